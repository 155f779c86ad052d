"""The command `openclaw-rl agents`: play episodes in environments, and show how the policy gets on in them.

The environments' packages may be in an interpreter of their own (`python` of the plan). The command then runs there, as
`python -m openclaw_rl.cli.agents`; this module therefore imports nothing of the server.
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer

from openclaw_rl import log
from openclaw_rl.agents import environment, report
from openclaw_rl.agents import plan as plans
from openclaw_rl.agents.api import EpisodesApi
from openclaw_rl.agents.journal import Journal
from openclaw_rl.agents.plan import Plan, SandboxPlan
from openclaw_rl.agents.runner import Runner
from openclaw_rl.agents.sandbox import Sandboxes
from openclaw_rl.errors import OpenClawRLError, SettingsError

app = typer.Typer(
    help="Episodes in environments: play them, evaluate, show the run.",
    short_help="Run agents in environments against a server.",
    no_args_is_help=True,
)
FileArgument = Annotated[Path, typer.Argument(help="Plan of the run, a TOML file.")]
ServerOption = Annotated[str | None, typer.Option("--server", help="URL of the server, in place of the plan's.")]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="Chat key of the server.", envvar="OPENCLAW_RL_AGENTS_KEY")
]


@app.command(short_help="Play training episodes until the plan is done.")
def run(file: FileArgument, server: ServerOption = None, key: KeyOption = None) -> None:
    """Play groups of episodes on the plan's environment, and evaluate held-out tasks beside them if the plan says so.

    A second start goes on where the journal ends, also after kill -9. Ctrl-C and SIGTERM abort what is played.
    """
    plan = _plan(file, server)
    _elsewhere(plan, "run", file, server, key)
    _main(plan, key, training=True)


@app.command("eval", short_help="Play the held-out tasks once.")
def evaluate(file: FileArgument, server: ServerOption = None, key: KeyOption = None) -> None:
    """Play the plan's held-out tasks on the served version, and print pass@1 with its 95 % interval, and pass@k."""
    plan = _plan(file, server)
    _elsewhere(plan, "eval", file, server, key)
    _main(plan, key, training=False)


@app.command(short_help="Show a run: groups, outcomes, evaluations.")
def status(file: FileArgument) -> None:
    """Show the run's groups, its faults, and its evaluations by version, from the journal. It needs no server."""
    plan = _plan(file, None)
    try:
        print("\n".join(report.of_file(plan.folder, plan.environment)))
    except SettingsError as error:
        _fail(str(error))


def _plan(file: Path, server: str | None) -> Plan:
    try:
        plan = plans.read(file)
    except SettingsError as error:
        _fail(str(error))
    return plan if server is None else plan.model_copy(update={"server": server})


def _elsewhere(plan: Plan, command: str, file: Path, server: str | None, key: str | None) -> None:
    """Go on in the plan's interpreter, if it is another one."""
    if plan.python is None or plan.python.absolute() == Path(sys.executable).absolute():
        return
    if not os.access(plan.python, os.X_OK):
        _fail(f"python: {plan.python} is no interpreter; scripts/agents/env.sh makes one")
    argv = [str(plan.python), "-m", "openclaw_rl.cli.agents", command, str(file)]
    if server is not None:
        argv += ["--server", server]
    environ = os.environ | ({} if key is None else {"OPENCLAW_RL_AGENTS_KEY": key})
    sys.stdout.flush()
    os.execve(plan.python, argv, environ)


def _main(plan: Plan, key: str | None, *, training: bool) -> None:
    log.configure(process="agents")
    _yield_cores(plan.nice)
    try:
        asyncio.run(_run(plan, key or "", training=training))
    except KeyboardInterrupt:
        sys.exit(130)
    except asyncio.CancelledError:
        sys.exit(143)
    except (OpenClawRLError, ExceptionGroup) as error:
        _fail(_words(error))


def _yield_cores(nice: int) -> None:
    """Give this process, and its sandboxes, at least this niceness."""
    if nice > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)


async def _run(plan: Plan, key: str, *, training: bool) -> None:
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)  # as Ctrl-C: it aborts what it plays
    made = environment.load(plan.environment, plan.options)
    journal = Journal(plan.folder, plan.environment, _tell)
    try:
        async with contextlib.AsyncExitStack() as stack:
            limits = httpx.Limits(max_connections=None, keepalive_expiry=4.0)
            # trust_env=False: the key must not pass through a proxy that the environment names.
            client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, limits=limits))
            sandboxes = _OfRun(plan.sandbox)
            stack.push_async_callback(sandboxes.close)
            if getattr(made, "needs_sandbox", False):
                await sandboxes.open()
            runner = Runner(plan, made, EpisodesApi(client, plan.server, key), journal, sandboxes.open, _tell)
            if close := getattr(made, "close", None):
                stack.push_async_callback(close)
            await (runner.train() if training else runner.evaluate())
    finally:
        journal.close()


class _OfRun:
    """The sandboxes of a run, chosen when the first one is asked for."""

    def __init__(self, plan: SandboxPlan) -> None:
        self._plan, self._lock = plan, asyncio.Lock()
        self._found: Sandboxes | None = None

    async def open(self) -> Sandboxes:
        async with self._lock:
            if self._found is None:
                self._found = await Sandboxes.choose(self._plan.kind, self._plan.limits, self._plan.folder)
            return self._found

    async def close(self) -> None:
        if self._found is not None:
            await self._found.close()


def _words(error: BaseException) -> str:
    """Return the words of the first error that the project raised on purpose; another one goes on as it is."""
    if isinstance(error, BaseExceptionGroup):
        ours, others = error.split(OpenClawRLError)
        if others is not None:
            raise error
        assert ours is not None
        return _words(ours.exceptions[0])
    return str(error)


def _tell(line: str) -> None:
    print(line, flush=True)


def _fail(message: str) -> NoReturn:
    for line in message.split("\n"):
        print(f"openclaw-rl: {line}", file=sys.stderr)
    raise SystemExit(2)


def main(**options: Any) -> None:
    app(**options)


if __name__ == "__main__":
    main(prog_name="openclaw-rl agents")
