"""Settings of the whole suite: hypothesis, the order of files for the workers, and models that several folders share.

No example fails for being slow: a busy machine is no bug. Examples are the same in each run, so that chance decides no
result; `TEST_SEEDS=new` draws others, for hypothesis and for the campaigns of `tests/integration`.
"""

import functools
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bundled
import httpx
import httpx._transports.default as httpx_transport
import pytest
import structlog
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from harness.host import Host
    from transformers import LlamaForCausalLM

settings.register_profile(
    "suite",
    parent=settings.get_profile("default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("TEST_SEEDS") != "new",
)
settings.load_profile("suite")

SERVERS = {
    "server": ("test_exact_reply", "test_loop"),
    "short_server": ("test_bad_input", "test_judge", "test_swap_cache"),
}
"""Files of `tests/integration` by their server: one worker runs all files of a server, which starts once."""
LONG_FIRST = (
    "tests/integration/test_loop.py",
    "tests/integration/test_exact_reply.py",
    "tests/integration/test_kill.py",
    "tests/integration/test_judge.py",
    "tests/integration/test_swap_cache.py",
    "tests/integration/test_bad_input.py",
    "tests/degradation/",
    "tests/openclaw_opd/test_alignment.py",
    "tests/openclaw_rl/engines/",
    "tests/browser/",
    "tests/security/",
    "tests/cases/",
    "tests/integration/",
    "tests/openclaw_rl/trainers/",
    "tests/scripts/",
)
"""Files that take long, in the order of their start; the rest follows, and evens the workers out."""


def pytest_configure() -> None:
    """Let the HTTP clients of all tests share a TLS context. Each would read 140 certificates for its own, which takes
    20 to 50 ms of CPU, and tests make thousands of clients."""
    httpx_transport.create_ssl_context = functools.cache(httpx.create_ssl_context)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((n for n, start in enumerate(LONG_FIRST) if item.nodeid.startswith(start)), len(LONG_FIRST))

    items.sort(key=place)
    items.sort(key=lambda item: item.path.name == "test_chaos.py")  # it waits for the run beside all others


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what thousands of collected tests and their imports hold out of each later collection of garbage. A server
    that a test runs in this process collects at its start, and would walk a million objects each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else extensions that count what they hold complain at the exit


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, in the order of collection, and the files of one server to the same worker."""
    from xdist.scheduler import LoadFileScheduling

    servers = {f"tests/integration/{file}.py": name for name, files in SERVERS.items() for file in files}

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return servers.get(file, file)

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(autouse=True)
def loggers_start_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that a test runs configures logging for the whole process, and a logger keeps for good what it was
    first used with: the next test would find its lines filtered. `keeps_loggers` leaves that as it is."""
    configure = structlog.configure
    if request.node.get_closest_marker("keeps_loggers") is None:
        monkeypatch.setattr(
            structlog, "configure", lambda **given: configure(**given | {"cache_logger_on_first_use": False})
        )
    yield
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def bundled_cache(pytestconfig: pytest.Config) -> Path:
    """Return a cache that holds the bundled model. One process converts it, for all later runs too."""
    return bundled.whole(pytestconfig.cache.mkdir("bundled"))


@pytest.fixture(scope="session")
def short_model(pytestconfig: pytest.Config) -> Path:
    """Return the folder of the bundled model with three of its layers: for whatever its replies say."""
    return bundled.shortened(pytestconfig.cache.mkdir("bundled"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model of words that cases are told in, and servers over a stub engine speak."""
    from harness.model import make_folder

    folder = tmp_path_factory.mktemp("word-model")
    make_folder(folder)
    return folder


@pytest.fixture(scope="session")
def host(model_folder: Path) -> "Iterator[Host]":
    """Server processes of that model, forked from one that has everything imported."""
    from harness.host import Host

    with Host(model_folder) as host:
        yield host


@pytest.fixture
def make_model() -> "Callable[..., LlamaForCausalLM]":
    """`make_model(seed=0, dtype=torch.float32)`: a random Llama of a few thousand parameters and 64 ids."""
    import torch  # most tests here need neither
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.4,
        )
        model = LlamaForCausalLM(config).to(dtype).eval()
        if dtype is torch.float64:
            _true_float64(model)
        return model

    return make


def _true_float64(model: "LlamaForCausalLM") -> None:
    """transformers' RMSNorm rounds to fp32 inside; torch's does not: float64 gradients can be compared to 1e-9."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            norm = torch.nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(name, norm)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the users of sandboxes can pass through, and that no other run clears; pytest's own is closed."""
    folder = Path(tempfile.mkdtemp(prefix="openclaw-rl-tests-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
