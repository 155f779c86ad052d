"""A stand-in for the program `openclaw`: the commands that `openclaw-rl connect` uses, on a JSON5 file.

`scripts/e2e.sh connect_openclaw` runs the same commands with the real one.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

import json5

CONFIG = Path(os.environ["OPENCLAW_CONFIG_PATH"])
REFUSED = os.environ.get("FAKE_REFUSES", "")
"""A key that the schema does not know."""
ROOTS = {"models", "agents", "gateway", "tools", "channels", "logging"}


def main(argv):
    match argv:
        case ["--version"]:
            print(f"OpenClaw {os.environ.get('FAKE_VERSION', '2026.9.6')} (abc)")
        case ["config", "file", "--json"]:
            print(json.dumps({"path": str(CONFIG)}))
        case ["config", "get", path, "--json"]:
            value = load()
            for key in path.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is None:
                return fail("no such path")
            print(json.dumps(redacted(value)))
        case ["config", "patch", "--stdin", *flags]:
            patch = json.load(sys.stdin)
            old = load()
            for at, flag in enumerate(flags):
                if flag == "--replace-path":
                    *above, last = flags[at + 1].split(".")
                    inner = old
                    for key in above:
                        inner = inner.get(key, {})
                    inner.pop(last, None)
            new = merged(old, patch)
            unknown = set(new) - ROOTS
            if REFUSED and REFUSED in json.dumps(new):
                unknown.add(REFUSED)
            if unknown:
                errors = [{"kind": "schema", "message": f"Unrecognized key: {min(unknown)}"}]
                print(json.dumps({"ok": False, "errors": errors}))
                return 1
            if "--dry-run" in flags:
                print(json.dumps({"ok": True, "checks": {"schema": True}}))
                return 0
            if os.environ.get("FAKE_FAILS"):
                return fail("the disk is full")
            text, size = json.dumps(new, indent=2), len(json.dumps(load(), indent=2))
            if size >= 512 and len(text) < size // 2:
                return fail(f"Config write rejected: {CONFIG} (size-drop:{size}->{len(text)})")
            CONFIG.parent.mkdir(parents=True, exist_ok=True)
            CONFIG.write_text(text)
            print("Restart the gateway to apply.")
        case ["health", *_]:
            return 0 if os.environ.get("FAKE_GATEWAY") == "1" else 1
        case ["agent", "--session-key", key, "--message", message, "--json", "--timeout", _, *local]:
            return agent(key, message, local)
        case _:
            return fail(f"unknown command {argv}")
    return 0


def agent(key, message, local):
    if not local and not os.environ.get("FAKE_GATEWAY"):
        return fail("gateway closed")
    if local and os.environ.get("FAKE_GATEWAY") == "starts":
        return fail("A Gateway is running for this state directory (pid 1, port 2). Run without --local to use it.")
    config = load()
    name, _, model = config["agents"]["defaults"]["model"]["primary"].partition("/")
    provider, session = config["models"]["providers"].get(name), f"id-of-{key}"
    if provider and not os.environ.get("FAKE_ELSEWHERE"):
        headers = {"Authorization": f"Bearer {provider['apiKey']}", "Content-Type": "application/json"}
        if not os.environ.get("FAKE_NO_SESSION"):
            headers["X-Session-Affinity"] = f"{session}:0"
        body = {"model": model, "messages": [{"role": "user", "content": message}]}
        request = urllib.request.Request(f"{provider['baseUrl']}/chat/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=10).read()
    meta = {"agentMeta": {"sessionId": session, "provider": name, "model": model}}
    result = {"payloads": [{"text": "pong"}], "meta": meta}
    print(json.dumps(result if local else {"runId": "r", "status": "ok", "result": result}))
    return 0


def load():
    return json5.loads(CONFIG.read_text()) if CONFIG.exists() else {}


def merged(old, patch):
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = merged(new.get(key), value)
    return new


def redacted(value):
    if isinstance(value, dict):
        return {key: "__OPENCLAW_REDACTED__" if key == "apiKey" else redacted(inner) for key, inner in value.items()}
    return value


def fail(message):
    print(json.dumps({"ok": False, "error": {"type": "cli_error", "message": message}}))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
