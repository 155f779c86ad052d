import pytest

from openclaw_rl.errors import SettingsError
from openclaw_slime.arguments import NodeOptions
from openclaw_slime.layout import Layout


def test_the_mission_layout_uses_every_gpu_once():
    assert Layout().table().splitlines() == [
        "  GPU 0–3   actor    Megatron, TP 4, CP 1, PP 1, DP 1",
        "  GPU 4–5   rollout  SGLang, one engine of TP 2",
        "  GPU 6–7   prm      SGLang, 1 × TP 2",
    ]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"actor_gpus": 6}, "= 10, but NUM_GPUS is 8"),
        ({"actor_gpus": 3, "actor_tp": 2}, "ACTOR_GPUS 3 is no multiple of TP"),
        ({"rollout_gpus": 2, "engine_tp": 1}, "ROLLOUT_GPUS 2 must be ROLLOUT_ENGINES 1 × ENGINE_TP 1"),
        ({"rollout_engines": 3, "engine_tp": 1}, "ROLLOUT_GPUS 2 must be ROLLOUT_ENGINES 3 × ENGINE_TP 1"),
        ({"rollout_engines": 0}, "ROLLOUT_ENGINES is 0"),
        ({"prm_gpus": 1}, "PRM_GPUS 1 is no multiple of PRM_TP 2"),
        ({"prm_gpus": -1}, "PRM_GPUS is -1"),
        ({"actor_gpus": 0}, "ACTOR_GPUS is 0"),
        ({"actor_tp": 0}, "^TP is 0"),
        ({"actor_tp": 1, "context_parallel": 0}, "^CP is 0"),
        ({"actor_tp": 1, "pipeline_parallel": -1}, "^PP is -1"),
        (
            {"actor_tp": 2, "context_parallel": 2, "pipeline_parallel": 2},
            "4 is no multiple of TP × CP × PP = 2 × 2 × 2",
        ),
        ({"num_gpus": 10, "actor_gpus": 6, "actor_tp": 2, "context_parallel": 3}, "CP 3 is no power of two"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_in_the_variables_own_names(wrong, what):
    with pytest.raises(SettingsError, match=what):
        Layout(**wrong)


def test_context_and_pipeline_parallelism_leave_less_data_parallelism_and_cut_within_a_node():
    layout = Layout(actor_gpus=4, actor_tp=1, context_parallel=2, pipeline_parallel=2)
    assert layout.data_parallel == 1
    assert "GPU 0–3   actor    Megatron, TP 1, CP 2, PP 2, DP 1" in layout.table()
    assert Layout(8, 8, 4, 4, actor_nodes=2, engine_tp=4, actor_tp=8, pipeline_parallel=2).data_parallel == 1
    with pytest.raises(SettingsError, match="ACTOR_GPUS 8 is no multiple of TP 16"):  # over two nodes
        Layout(8, 8, 4, 4, actor_nodes=2, engine_tp=4, actor_tp=16)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_tensor_parallelism_leaves_is_data_parallel(tp):
    assert Layout(actor_tp=tp).data_parallel * tp == 4


def test_on_one_card_every_part_begins_at_the_first_gpu():
    layout = Layout(1, 1, 1, 0, actor_tp=1, engine_tp=1, is_shared=True)
    assert [layout.gpus(part) for part in ("actor", "rollout", "prm")] == ["0", "0", ""]
    with pytest.raises(SettingsError, match="PUSH=disk"):
        NodeOptions("CK", layout=layout)
    assert NodeOptions("CK", layout=layout, push="disk").push == "disk"


def test_on_two_cards_the_prm_may_begin_at_the_policy_engines():
    layout = Layout(2, 1, 1, 1, actor_tp=1, engine_tp=1, prm_tp=1, is_prm_beside=True)
    assert [layout.gpus(part) for part in ("actor", "rollout", "prm")] == ["0", "1", "1"]
    assert NodeOptions("CK", layout=layout).push == "nccl"
    with pytest.raises(SettingsError, match="= 3, but NUM_GPUS is 2"):
        Layout(2, 1, 1, 1, actor_tp=1, engine_tp=1, prm_tp=1)
    with pytest.raises(SettingsError, match="but NUM_GPUS is 2"):
        Layout(2, 1, 1, 2, actor_tp=1, engine_tp=1, prm_tp=1, is_prm_beside=True)


def test_another_split_of_the_node_stands():
    layout = Layout(actor_gpus=2, rollout_gpus=4, prm_gpus=2, actor_tp=2, engine_tp=4)
    assert "GPU 2–5   rollout" in layout.table()


def test_the_gpus_that_serve_are_divided_among_engines():
    layout = Layout(rollout_engines=2, engine_tp=1)
    assert "  GPU 4–5   rollout  SGLang, 2 engines of TP 1" in layout.table()
    assert layout.gpus("rollout") == "4,5"


def test_where_other_nodes_train_all_of_this_one_serves():
    layout = Layout(8, 8, 4, 4, actor_nodes=2, engine_tp=4)
    assert [layout.gpus(part) for part in ("actor", "rollout", "prm")] == ["", "0,1,2,3", "4,5,6,7"]
    assert layout.data_parallel == 4
    assert layout.table().splitlines() == [
        "  GPU 0–3   rollout  SGLang, one engine of TP 4",
        "  GPU 4–7   prm      SGLang, 2 × TP 2",
        "  2 other × 8 GPUs   actor    Megatron, TP 4, CP 1, PP 1, DP 4",
    ]
    with pytest.raises(SettingsError, match=r"ROLLOUT_GPUS 4 \+ PRM_GPUS 6 = 10, but NUM_GPUS is 8"):
        Layout(8, 8, 4, 6, actor_nodes=2, engine_tp=4)
    with pytest.raises(SettingsError, match="ACTOR_NODES is -1"):
        Layout(actor_nodes=-1)


def test_a_batch_must_be_shared_out_evenly():
    with pytest.raises(SettingsError, match="BATCH_SIZE 16 is no multiple of the 3 replicas"):
        NodeOptions("CK", layout=Layout(8, 4, 4, 4, actor_nodes=3, engine_tp=4))
