"""Sources of a slime that holds only the code that the plugin relies on."""

FILES = {
    "slime/ray/placement_group.py": """
def create_placement_groups(args): ...
def create_rollout_manager(args, pg): ...
def create_training_models(args, pgs, rollout_manager, actor_cls=None): ...
""",
    "slime/observability/logging_utils.py": """
def configure_logger(prefix=""): ...
def init_tracking(args, primary=True, **kwargs): ...
def finish_tracking(args): ...
""",
    "slime/ray/actor_group.py": """
class RayTrainGroup:
    def async_train(self, rollout_id, rollout_data_ref, external_data=None): ...
    def save_model(self, rollout_id, force_sync=False): ...
    def update_weights(self):
        return [actor.update_weights.remote() for actor in self._actor_handlers]
""",
    "slime/ray/rollout.py": """
class RolloutManager:
    def generate(self, rollout_id): ...
    def save(self, rollout_id): ...
    def load(self, rollout_id=None): ...
    def dispose(self): ...
    def _get_rollout_data(self, rollout_id):
        return call(rollout_id, evaluation=False)
""",
    "slime/backends/megatron_utils/actor.py": """
class MegatronTrainRayActor:
    def update_weights(self): ...
    def train(self, rollout_id, rollout_data_ref, external_data=None): ...
    def train_actor(self, rollout_id, rollout_data, external_data=None): ...
    def save_model(self, rollout_id, force_sync=False):
        write(self.args.save_hf.format(rollout_id=rollout_id))
""",
    "slime/utils/distributed_utils.py": """
def get_gloo_group(): ...
""",
    "slime/backends/megatron_utils/cp_utils.py": """
def slice_log_prob_with_cp(log_prob, total_length, response_length): ...
""",
    "slime/backends/megatron_utils/data.py": """
class DataIterator:
    def get_next(self, vals, indices):
        return [vals[i] for i in indices]
""",
    "slime/backends/megatron_utils/loss.py": """
def get_responses(logits, *, args, unconcat_tokens, total_lengths, response_lengths, apply_temperature=True): ...
def compute_advantages_and_returns(args, rollout_data):
    custom_adv_fn(args, rollout_data)
def loss_function(args, batch, logits, sum_of_sample_mean):
    return func(args, batch, logits, sum_of_sample_mean)
""",
    "slime/backends/megatron_utils/model.py": """
def train_one_step(optimizer, opt_param_scheduler, valid_step):
    found_inf_flag = optimizer.prepare_grads()
    if valid_step:
        opt_param_scheduler.step(increment=1)
""",
    "slime/backends/megatron_utils/update_weight/update_weight_from_disk.py": """
class UpdateWeightFromDisk:
    def update_weights(self):
        self.weight_version += 1
        folder = f"weight_v{self.weight_version:06d}"
""",
    "slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py": """
class UpdateWeightFromDistributed:
    def update_weights(self):
        self.weight_version += 1
""",
}
