"""The installed OpenClaw, by its own command line: its configuration is read and written through it alone.

Facts about it are those of the package (2026.9.6): `config patch` merges objects, replaces arrays, deletes by `null`,
and checks the whole result before it writes. A redacted value of `config get` is never written back.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.cli.connect.other_clients import NO_KEY
from openclaw_rl.cli.connect.served import MODEL, Served
from openclaw_rl.errors import ClientError

TESTED = "2026.9.6"
READ_FIRST = ("models", "agents", "gateway", "tools")
"""Branches of the configuration that a plan looks at."""
OWN_PROMPT = 13_000
"""Tokens of OpenClaw's own prompt and tools, with its defaults."""
SMALL: Mapping[str, Any] = {
    "agents": {"defaults": {"skipBootstrap": True, "contextInjection": "never", "skills": []}},
    "tools": {"deny": ["*"]},
}
"""OpenClaw's smallest profile: about 1,800 tokens of prompt, no tools."""
_CALL_S, _WRITE_S, _TURN_S = 120.0, 300.0, 600.0
_GATEWAY_RUNS = "Gateway is running"
"""Words of the client's refusal to run beside its gateway."""
_INCLUDE = re.compile(r"""\$include["']?\s*:\s*(\[[^\]]*\]|"[^"\n]*"|'[^'\n]*')""")
_QUOTED = re.compile(r"""["']([^"'\n]+)["']""")


@dataclass(frozen=True, slots=True)
class Said:
    """One reply of the client to a message, and the session that it was given in."""

    text: str
    session_id: str | None
    model: str
    """The provider's name and the model's, as the client tells them."""


class OpenClaw:
    def __init__(self, executable: str = "openclaw") -> None:
        """Raises ClientError without such a program."""
        found = shutil.which(executable)
        if found is None:
            raise ClientError(
                f"no program {executable!r} on the PATH: install OpenClaw, name it with --client, or use --print on"
                " this machine and `openclaw config patch --stdin` on the other"
            )
        # Its Node may lie beside it.
        self._argv, self._environ = found, os.environ | {"PATH": f"{Path(found).parent}:{os.environ.get('PATH', '')}"}

    def version(self) -> str:
        found = re.search(r"\d{4}\.\d+\.\d+\S*", self._run("--version"))
        return found[0] if found else "of an unknown version"

    def config_file(self) -> Path:
        """Return the path of the configuration; the file need not exist."""
        path = Path(_object(self._run("config", "file", "--json")).get("path") or "")
        if not path.is_absolute():
            raise ClientError("`openclaw config file --json` names no file")
        if path.is_symlink():
            raise ClientError(
                f"{path} is a symbolic link, and the client replaces it when it writes: set OPENCLAW_CONFIG_PATH to"
                f" {path.resolve()}"
            )
        return path

    def values(self, paths: Sequence[str]) -> dict[str, Any]:
        """Return the values at these paths, secrets redacted, without the paths that are not set."""
        with ThreadPoolExecutor(len(paths)) as pool:  # a start of the client takes a second or more
            return {path: value for path, value in zip(paths, pool.map(self._value, paths), strict=True) if value}

    def patch(self, patch: Mapping[str, Any], *, replaced: Sequence[str] = (), is_dry: bool = False) -> str:
        """Merge the patch into the configuration, or only check that it could be. Return the client's words.

        replaced: paths whose old value goes as a whole. Raises ClientError with the client's reasons.
        """
        flags = [word for path in replaced for word in ("--replace-path", path)]
        text = json.dumps(patch)
        if not is_dry:
            return self._run("config", "patch", "--stdin", *flags, stdin=text, timeout_s=_WRITE_S).strip()
        done = self._start("config", "patch", "--stdin", "--dry-run", "--json", *flags, stdin=text, timeout_s=_WRITE_S)
        answer = _object(done.stdout, or_else={})
        if done.returncode or not answer.get("ok"):
            reasons = [str(error.get("message")) for error in answer.get("errors") or [] if isinstance(error, dict)]
            raise ClientError("OpenClaw refuses this configuration: " + ("; ".join(reasons) or _tail(done)))
        return ""

    def has_gateway(self) -> bool:
        """Return True if the gateway answers."""
        # Without a gateway the connection is refused at once; a busy one takes its time.
        return self._start("health", "--json", "--timeout", "30000").returncode == 0

    def say(self, message: str, session_key: str, *, is_local: bool) -> Said:
        """Send one message to the default agent. is_local: without the gateway. Raises ClientError."""
        argv = ["agent", "--session-key", session_key, "--message", message, "--json", "--timeout", f"{_TURN_S:.0f}"]
        try:
            answer = _object(self._run(*argv, *(["--local"] if is_local else []), timeout_s=_TURN_S + 120))
        except ClientError as error:
            if not (is_local and _GATEWAY_RUNS in str(error)):
                raise
            return self.say(message, session_key, is_local=False)  # it was starting, and did not answer yet
        result = answer.get("result") or answer
        meta = (result.get("meta") or {}).get("agentMeta") or {}
        texts = [str(part.get("text") or "") for part in result.get("payloads") or []]
        return Said(
            text="\n".join(texts).strip(),
            session_id=meta.get("sessionId"),
            model=f"{meta.get('provider', '?')}/{meta.get('model', '?')}",
        )

    def _value(self, path: str) -> Any:
        done = self._start("config", "get", path, "--json")
        return json.loads(done.stdout) if done.returncode == 0 else None

    def _run(self, *argv: str, stdin: str = "", timeout_s: float = _CALL_S) -> str:
        done = self._start(*argv, stdin=stdin, timeout_s=timeout_s)
        if done.returncode:
            raise ClientError(f"`openclaw {' '.join(argv[:2])}` failed: {_tail(done)}")
        return done.stdout

    def _start(self, *argv: str, stdin: str = "", timeout_s: float = _CALL_S) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self._argv, *argv],
                input=stdin,
                env=self._environ,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClientError(f"`openclaw {' '.join(argv[:2])}` failed: {error}") from error


@dataclass(frozen=True, slots=True)
class Plan:
    """A change of the client's configuration, and its way back."""

    patch: dict[str, Any]
    back: dict[str, Any]
    """Patch that takes our values out and puts the old ones back."""
    old: Mapping[str, Any]
    remarks: tuple[str, ...]
    provider: str

    @property
    def keeps_provider(self) -> bool:
        """True: the provider is the user's own, and stays as it is."""
        return "models" not in self.patch

    @property
    def replaced(self) -> tuple[str, ...]:
        is_there = _at(self.old, "models", "providers", self.provider) is not None
        return (f"models.providers.{self.provider}",) if is_there and not self.keeps_provider else ()

    def lines(self) -> Iterator[str]:
        """Yield one line for each value that changes; a key is not shown."""
        for path, value in leaves(self.patch):
            before = _at(self.old, *path)
            if path[-1] == "apiKey":
                shown = "no key" if value == NO_KEY else "a chat key"
            elif before == value:
                continue
            else:
                shown = json.dumps(value, ensure_ascii=False)
            had = (
                "" if before is None or path[-1] == "apiKey" else f"    (was {json.dumps(before, ensure_ascii=False)})"
            )
            yield f"  {'.'.join(path)} = {shown}{had}"


def plan(
    served: Served, old: Mapping[str, Any], provider: str, *, is_new: bool, is_small: bool, is_ours: bool = False
) -> Plan:
    """Return the change that makes the served model the client's default.

    old: the values of READ_FIRST. is_new: there is no configuration. is_small: OpenClaw's smallest profile too.
    is_ours: a provider of that name is from an earlier `connect`. Else it is the user's, and stays: it must have this
    server's address and model. Raises ClientError.
    """
    if _at(old, "gateway", "mode") == "remote":
        raise ClientError(
            "this OpenClaw uses a gateway on another machine (gateway.mode is remote): run `connect openclaw --print`"
            " with --url here, and `openclaw config patch --stdin` there"
        )
    there = _at(old, "models", "providers", provider)
    keeps = there is not None and not is_ours
    if keeps and there.get("baseUrl") != served.base_url:
        raise ClientError(
            f"OpenClaw has a provider {provider!r} already, at {there.get('baseUrl')}: --provider gives ours another"
            " name"
        )
    if keeps and _own_entry(there) is None:
        raise ClientError(
            f"OpenClaw has a provider {provider!r} of yours for this server, without a model {MODEL!r}: --provider"
            " gives ours another name"
        )
    reference = f"{provider}/{MODEL}"
    patch: dict[str, Any] = {"agents": {"defaults": {"model": {"primary": reference}}}}
    if not keeps:
        # `replace` is a user's own choice: it hides the built-in models, and ours is listed all the same.
        mode = _at(old, "models", "mode") or "merge"
        patch["models"] = {"mode": mode, "providers": {provider: _provider(served)}}
    if is_new:
        patch["gateway"] = {"mode": "local"}  # the gateway refuses to start without it
    if is_small:
        patch = _merged(patch, SMALL)
    back = {key: value for key, value in _back(patch, old).items() if key not in ("models", "gateway")}
    if not keeps:
        providers: dict[str, Any] = {"providers": {provider: None}}
        back["models"] = providers if _at(old, "models", "mode") else {"mode": None, **providers}
    model = _at(old, "agents", "defaults", "model")
    back["agents"]["defaults"]["model"] = {"primary": model.get("primary")} if isinstance(model, dict) else model
    remarks = _remarks(served, old, reference, is_small=is_small, keeps=there if keeps else None)
    return Plan(patch, back, old, tuple(remarks), provider)


def is_ours(back: Mapping[str, Any], provider: str) -> bool:
    """Return True if an earlier `connect`, whose way back is `back`, made the provider."""
    return provider in (_at(back, "models", "providers") or {})


def after(back: Mapping[str, Any], ours: Mapping[str, Any], plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the way back from a plan that follows earlier ones, and the values that all of them wrote.

    back, ours: those of the earlier plans. What the user changed since then goes back to the user's value.
    """
    return _merged(plan.back, without_theirs(back, ours, plan.old)), _merged(ours, plan.patch)


def without_theirs(back: Mapping[str, Any], ours: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return `back` without the values that the user has changed since we wrote `ours`. Our provider goes in any case.

    now: the values of READ_FIRST as they are.
    """
    written = [(path, value) for path, value in leaves(ours) if path[:2] != ("models", "providers")]
    found: dict[str, Any] = {}
    for path, value in leaves(back):
        under = [(own, is_ours) for own, is_ours in written if own[: len(path)] == path]
        if any(_at(now, *own) != is_ours for own, is_ours in under):
            continue
        inner = found
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return found


def steps_back(back: Mapping[str, Any], models: Any) -> Iterator[dict[str, Any]]:
    """Yield patches that together do what `back` does: the client refuses a write that halves its file.

    models: that branch of the configuration. A provider of ours shrinks before it goes, the default model goes first.
    """
    if rest := {key: value for key, value in back.items() if key != "models"}:
        yield rest
    for name in _at(back, "models", "providers") or {}:
        entries = _at(models, "providers", name, "models")
        for kept in (("id", "name", "reasoning", "contextWindow", "maxTokens"), ("id", "name")):
            if isinstance(entries, list):
                smaller = [{key: entry[key] for key in kept if key in entry} for entry in entries]
                yield {"models": {"providers": {name: {"models": smaller}}}}
        yield {"models": {"providers": {name: None}}}
    if own := {key: value for key, value in back.get("models", {}).items() if key != "providers"}:
        yield {"models": own}


def without_session_headers(plan: Plan) -> Plan:
    """Return the plan for a version of the client that does not know the key of the session headers."""
    patch: dict[str, Any] = json.loads(json.dumps(plan.patch))
    patch["models"]["providers"][plan.provider]["models"][0]["compat"].pop("sendSessionAffinityHeaders")
    says = "this version knows no session headers: the server tells sessions by OpenClaw's `Runtime:` line"
    return Plan(patch, plan.back, plan.old, (*plan.remarks, says), plan.provider)


def config_files(root: Path) -> list[Path]:
    """Return the configuration and the files that it includes from its folder: the client may write to each."""
    found, todo = [root], [root]
    while todo and len(found) < 100:
        here = todo.pop()
        text = here.read_text(encoding="utf-8", errors="replace") if here.is_file() else ""
        for group in _INCLUDE.findall(text):
            for name in _QUOTED.findall(group):
                path = (here.parent / name).resolve()
                if path.is_relative_to(root.parent.resolve()) and path.is_file() and path not in found:
                    found.append(path)
                    todo.append(path)
    return found


def _provider(served: Served) -> dict[str, Any]:
    compat: dict[str, Any] = {"sendSessionAffinityHeaders": True}
    if not served.has_tools:
        compat["supportsTools"] = False
    entry = {
        "id": MODEL,
        "name": MODEL,
        "reasoning": served.thinks,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": served.context,
        "maxTokens": served.reply_tokens,
        "compat": compat,
    }
    api_key = served.key or NO_KEY
    return {"baseUrl": served.base_url, "apiKey": api_key, "api": "openai-completions", "models": [entry]}


def _own_entry(provider: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the entry of our model in a provider, if it has one."""
    return next((entry for entry in provider.get("models") or [] if _at(entry, "id") == MODEL), None)


def _remarks(
    served: Served, old: Mapping[str, Any], reference: str, *, is_small: bool, keeps: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield what a person should know of the plan. keeps: the user's own provider, which stays."""
    if keeps is not None:
        window = _at(_own_entry(keeps), "contextWindow")
        other = "" if window == served.context else f"; its contextWindow is {window}, the server's {served.context}"
        yield (
            f"models.providers.{reference.split('/')[0]} is yours and stays as it is, its key too{other}"
            " (--provider writes one of ours under another name)"
        )
    has_tools = _at(old, "tools", "deny") != SMALL["tools"]["deny"]
    if served.context < OWN_PROMPT + served.reply_tokens and has_tools and not is_small:
        yield (
            f"OpenClaw's own prompt and tools have about {OWN_PROMPT} tokens, and the context {served.context}:"
            " --small also writes its smallest profile, without tools"
        )
    for name, agent in (_at(old, "agents", "entries") or {}).items():
        model = agent.get("model") if isinstance(agent, dict) else None
        own = model.get("primary") if isinstance(model, dict) else model
        if own not in (None, reference):
            yield f"agent {name!r} keeps its own model {own}"
    allowed = _at(old, "agents", "defaults", "modelPolicy", "allow") or []
    provider = reference.split("/")[0]
    if allowed and not {reference, f"{provider}/*"} & set(allowed):
        yield f"agents.defaults.modelPolicy.allow does not list {reference}: /model cannot choose it"


def _back(patch: Mapping[str, Any], old: Any) -> dict[str, Any]:
    """Return the patch that undoes `patch` on a configuration with the values `old`."""
    found: dict[str, Any] = {}
    for key, value in patch.items():
        before = old.get(key) if isinstance(old, Mapping) else None
        found[key] = _back(value, before) if isinstance(value, Mapping) else before
    return found


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    shared = [key for key in one.keys() & other.keys() if isinstance(one[key], Mapping)]
    both = {key: _merged(one[key], other[key]) for key in shared if isinstance(other[key], Mapping)}
    return {**one, **other, **both}


def leaves(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each part of a patch that is no object."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from leaves(inner, (*path, key))
        else:
            yield (*path, key), inner


def _at(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _object(text: str, or_else: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in the client's answer. Raises ClientError without one, unless `or_else` is given."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    if or_else is not None:
        return or_else
    raise ClientError(f"OpenClaw answered with no JSON: {text[:200]!r}")


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    answer = _object(done.stdout, or_else={})
    message = _at(answer, "error", "message")
    lines = (str(message) if message else done.stderr or done.stdout).strip().splitlines()
    return " ".join(line.strip() for line in lines[-6:]) or f"exit code {done.returncode}"
