"""The `method` branch of the settings: its base class, and the class of each installed method.

A method owns its settings (`Method.settings`). This module finds the class by `method.name`, through the entry points
`openclaw_rl.methods`, and validates the table with it. The settings are a lower floor than the methods, so this module
imports no method by name.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings.base import Branch, registered

ENTRY_POINT_GROUP = "openclaw_rl.methods"
DEFAULT_METHOD = "binary_rl"
_SHIPPED = {
    "binary_rl": "openclaw_rl.methods.binary_rl:METHOD",
    "opd": "openclaw_opd.method:METHOD",
    "combine": "openclaw_combine.method:METHOD",
    "agent": "openclaw_rl.methods.agent:METHOD",
}


class MethodSettings(Branch):
    """Settings that every method has. A method with keys of its own inherits from this class (`Method.settings`).

    The properties are the facts that the rest of the system asks of a method. They depend on its settings alone.
    """

    name: str = DEFAULT_METHOD
    """`binary_rl`, `opd`, `combine`, `agent`, or a method that another package has installed under the entry points
    `openclaw_rl.methods`."""
    demonstration_weight: float = Field(default=1.0, ge=0)
    """Weight of the supervised loss on replies that users wrote themselves."""
    score_workers: int = Field(default=4, ge=1)
    """Turns scored at once; scoring yields to chats."""

    @property
    def needs_engine(self) -> bool:
        """True when `Method.score` calls an engine."""
        return False

    @property
    def needs_hint_judge(self) -> bool:
        """True when `Method.score` asks a judge for hints."""
        return False

    @property
    def takes_pictures(self) -> bool:
        """True when the method trains on turns whose prompt has pictures. Engines score such a turn with them."""
        return False

    @property
    def ema_teacher_decay(self) -> float | None:
        """Share of the old EMA teacher that each version keeps; None when the method needs no EMA teacher."""
        return None

    @property
    def needs_ema(self) -> bool:
        """True when the local trainer writes an EMA teacher beside each version."""
        return self.ema_teacher_decay is not None

    @property
    def can_practise(self) -> bool:
        """True when these settings leave a teacher that stays in its place while the policy practises."""
        return False

    @property
    def base_teacher_url(self) -> str | None:
        """URL of a second engine, which serves the base alone; None when the method uses no such engine."""
        return None

    @property
    def credits_groups(self) -> bool:
        """True when the method gives credit to the steps of a closed group of episodes (`GroupMethod.credit`)."""
        return False

    @property
    def judges_steps(self) -> bool:
        """True when a judge votes on the steps of episodes."""
        return self.credits_groups

    @property
    def scores_given_ids(self) -> bool:
        """True when the method asks an engine for the log-probs of ids that it names (`Engine.score_ids`)."""
        return False

    def never_trains(self) -> Iterator[str]:
        """Yield a line for each value under which no sample of this method has a loss."""
        yield from ()

    def conflicts(self, weights: Literal["lora", "full"]) -> Iterator[str]:
        """Yield a line for each value that contradicts another one, or `training.weights`."""
        yield from ()


def installed_methods() -> dict[str, EntryPoint]:
    """Return the entry point of each method by name: the shipped ones, and those of other packages."""
    return registered(ENTRY_POINT_GROUP, _SHIPPED)


def method_object(name: str) -> Any:
    """Import the object that is registered under `name`.

    Raises SettingsError that lists the known names, or that says why the object cannot be imported.
    """
    found = installed_methods()
    if name not in found:
        raise SettingsError(f"no method {name!r}; installed: {', '.join(sorted(found))}")
    try:
        return found[name].load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"method {name!r}: {found[name].value} cannot be loaded: {error!r}") from error


def settings_class(name: str) -> type[MethodSettings]:
    """Return the settings class of the method. Raises SettingsError, as `method_object`."""
    found: type[MethodSettings] = getattr(method_object(name), "settings", MethodSettings)
    return found


def default_method_settings() -> MethodSettings:
    return settings_class(DEFAULT_METHOD)()


def methods_with(key: str) -> list[str]:
    """Return the names of the installed methods that have the setting `method.<key>`."""
    found = []
    for name in installed_methods():
        try:
            is_known = key in settings_class(name).model_fields
        except SettingsError:  # a broken package of another method must not hide the user's own mistake
            continue
        if is_known:
            found.append(name)
    return found


def _of_its_method(value: object) -> object:
    """Validate a table with the class of the method that it names; pass instances on."""
    if not isinstance(value, Mapping):
        return value
    name = value.get("name", DEFAULT_METHOD)
    if not isinstance(name, str):
        return MethodSettings.model_validate({"name": name})
    try:
        of_method = settings_class(name)
    except SettingsError as error:
        problem = PydanticCustomError("no_method", "{problem}", {"problem": str(error)})
        line = InitErrorDetails(type=problem, loc=("name",), input=value)
        raise ValidationError.from_exception_data("method", [line]) from error
    return of_method.model_validate(value)


AnyMethodSettings = Annotated[SerializeAsAny[MethodSettings], BeforeValidator(_of_its_method)]
"""The settings of any installed method. A table is validated with the class of the method that its `name` names."""
