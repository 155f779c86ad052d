"""The command `openclaw-rl experiment`: simulated people correct a running server, and ask it new questions."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import httpx
import typer

from openclaw_rl.cli.options import ConfigOption, DataDirOption, chat_key, fail, target, url_of
from openclaw_rl.offline import personalization, personas
from openclaw_rl.offline.personalization import Plan
from openclaw_rl.offline.personas import ExperimentError, ModelPerson, Person, RulePerson
from openclaw_rl.offline.problems import problems as load_problems

app = typer.Typer(
    help="Experiments with a running server through its public API.",
    short_help="Experiments with simulated people.",
    no_args_is_help=True,
)
_PEOPLE = (*personas.PREFERENCES, *personas.ROLES)
_DEFAULT = Plan()


@app.command("personalization", short_help="Correct the server a few times, and measure what it learned.")
def personalize(
    person: Annotated[
        str, typer.Option(help=f"Whose wish: one of {', '.join(_PEOPLE)}. The last two need --user-url and --problems.")
    ] = "short",
    seed: Annotated[int, typer.Option(help="Seed of the questions, the user's words and the sampling.")] = 0,
    corrections: Annotated[
        int, typer.Option(help="Corrected chats, after which the person rests.", min=1)
    ] = _DEFAULT.corrections,
    held_out: Annotated[int, typer.Option(help="New questions before and after.", min=3)] = _DEFAULT.held_out,
    max_tokens: Annotated[int, typer.Option(help="Longest reply, in tokens.", min=1)] = _DEFAULT.max_tokens,
    idle_minutes: Annotated[
        float, typer.Option(help="Longest rest after the corrections, in which the server practises.", min=0)
    ] = _DEFAULT.idle_s / 60,
    user_url: Annotated[
        str | None,
        typer.Option(help="OpenAI-compatible base URL of the model that plays the person and rates."),
    ] = None,
    user_model: Annotated[str, typer.Option(help="Model name at --user-url.")] = "default",
    user_key: Annotated[
        str | None, typer.Option(help="Key for --user-url.", envvar="OPENCLAW_RL_EXPERIMENT_KEY")
    ] = None,
    problems: Annotated[
        str | None,
        typer.Option(
            help='Word problems: a JSON file, a list of {"question", "answer"}; or a data set of the hub, as '
            'openai/gsm8k (pip install "openclaw-rl[datasets]"). The student and the teacher ask about them; --checks '
            "of them are asked before and after."
        ),
    ] = None,
    checks: Annotated[
        int, typer.Option(help="Number of --problems, the first ones, whose answers are checked.", min=0)
    ] = 0,
    out: Annotated[Path, typer.Option(help="Results: NAME.json, NAME.md and NAME.svg.")] = Path("personalization"),
    url: Annotated[str | None, typer.Option(help="Server. Default: the running server of the data directory.")] = None,
    key: Annotated[str | None, typer.Option(help="Chat key. Default: the first of server.api_keys.")] = None,
    method: Annotated[str | None, typer.Option(help="Name of this server's settings in the table.")] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Simulate a person with a wish against the running server, which should be a fresh one.

    The person asks questions of its own, and complains of replies that do not meet its wish, as its next message. Then
    it rests, and the server trains and practises. New questions, which train nothing, are asked before and after;
    before also with the wish in the system prompt, as agents' memories have it.

    Results of one NAME add up: another seed, person or method is a row of the same table.
    """
    settings = target(config, data_dir)
    where = url or url_of(settings)
    token = chat_key(settings, key)
    plan = Plan(corrections, held_out, max_tokens=max_tokens, idle_s=60 * idle_minutes)
    file = out.with_suffix(".json")
    try:
        results = personalization.load([file]) if file.exists() else []
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with httpx.Client(base_url=where, headers=headers, timeout=600.0, trust_env=False) as client:
            chat = personalization.Chat(client, plan, seed)
            who = _person(person, seed, user_url, user_model, user_key, problems)
            name = method or settings.method.name
            checked = load_problems(problems, checks) if problems and checks else ()
            results.append(personalization.run(chat, who, plan, seed, name, _tell, checked))
    except ExperimentError as error:
        fail(str(error))
    file.write_text(json.dumps([asdict(result) for result in results], indent=1, ensure_ascii=False) + "\n")
    _write(results, out)


@app.command("report", short_help="Write the table and the bars of results that exist.")
def report(
    files: Annotated[list[Path], typer.Argument(help="JSON files of experiments.")],
    out: Annotated[Path, typer.Option(help="Results: NAME.md and NAME.svg.")] = Path("personalization"),
) -> None:
    """Write one table and one picture of several results."""
    try:
        _write(personalization.load(files), out)
    except ExperimentError as error:
        fail(str(error))


def _tell(line: str) -> None:
    print(line, flush=True)


def _write(results: list[personalization.Result], out: Path) -> None:
    text = personalization.report(results)
    out.with_suffix(".md").write_text(text)
    print(text)
    if not personalization.draw(results, out.with_suffix(".svg")):
        print('no picture: pip install "openclaw-rl[plots]"')


def _person(name: str, seed: int, url: str | None, model: str, key: str | None, problems: str | None) -> Person:
    if name in personas.PREFERENCES:
        return RulePerson(personas.PREFERENCES[name], seed)
    if name not in personas.ROLES:
        fail(f"--person {name!r}: one of {', '.join(_PEOPLE)}")
    if url is None or problems is None:
        fail(f"--person {name} needs --user-url and --problems")
    return ModelPerson(personas.ROLES[name], load_problems(problems), _model(url, model, key))


def _model(url: str, model: str, key: str | None) -> personas.Ask:
    client = httpx.Client(
        base_url=url.rstrip("/"), headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=300.0
    )

    def ask(system: str, user: str) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        try:
            answer = client.post("/chat/completions", json={"model": model, "messages": messages, "temperature": 0})
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"] or "")
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            raise ExperimentError(f"the model at {url} does not play its part: {error!r}") from error

    return ask
