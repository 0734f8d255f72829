"""Settings of every process: flag, then COPPICE_SECTION__NAME, then YAML, then default."""

import difflib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError, YamlConfigSettingsSource

from coppice.config import sections
from coppice.errors import InvalidField
from coppice.limits import Limits

# Variables that are no settings of a section: read by the SDK, the test suite and load_settings.
_OTHER_VARIABLES = {f"COPPICE_{name}" for name in ("ADAPTER_ADDRESS", "ADDRESS", "CONFIG", "PROOF", "TOKEN")}


class Settings(BaseSettings):
    """Everything a Coppice process can be told; each process reads the sections it uses."""

    model_config = SettingsConfigDict(env_prefix="COPPICE_", env_nested_delimiter="__", frozen=True, extra="forbid")

    server: sections.ServerSettings = sections.ServerSettings()
    telemetry: sections.TelemetrySettings = sections.TelemetrySettings()
    tls: sections.TlsSettings = sections.TlsSettings()
    limits: Limits = Limits()
    verifier: sections.VerifierSettings = sections.VerifierSettings()
    drafter: sections.DrafterSettings = sections.DrafterSettings()
    directory: sections.DirectorySettings = sections.DirectorySettings()
    orchestrator: sections.OrchestratorSettings = sections.OrchestratorSettings()
    adaptation: sections.AdaptationSettings = sections.AdaptationSettings()
    adapter: sections.AdapterSettings = sections.AdapterSettings()

    @classmethod
    def settings_customise_sources(cls, settings_cls: type[BaseSettings], **sources: Any) -> tuple[Any, ...]:  # type: ignore[override]
        """Flags come first (pydantic-settings puts them before these), then variables, the YAML file and arguments."""
        file = YamlConfigSettingsSource(settings_cls, yaml_file=os.environ.get("COPPICE_CONFIG") or None)
        return sources["env_settings"], file, sources["init_settings"]


def _names() -> list[str]:
    """SECTION.NAME of every setting."""
    models: Any = {section: field.annotation for section, field in Settings.model_fields.items()}
    return [f"{section}.{name}" for section, model in models.items() for name in model.model_fields]


def _no_such(what: str, names: Iterable[str]) -> InvalidField:
    """The error for a name that is no setting, with the nearest name that is."""
    close = difflib.get_close_matches(what, [*names], n=1, cutoff=0.75)
    return InvalidField(what, f"no such setting{f'; did you mean {close[0]}?' if close else ''}")


def _check_names(arguments: Sequence[str]) -> None:
    """Raise InvalidField for a flag or a variable that nobody reads: pydantic-settings would pass over the variable."""
    flags = {"-h", "--help", *(f"--{name}" for name in (*Settings.model_fields, *_names()))}
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag == "--config":
            raise InvalidField("config", "write --config FILE, once")
        if flag.startswith("--") and flag not in flags:
            raise _no_such(flag, {*flags, "--config"})
    variables = _OTHER_VARIABLES | {f"COPPICE_{name}".replace(".", "__").upper() for name in _names()}
    for variable in os.environ:
        if variable.upper().startswith("COPPICE_") and variable.upper() not in variables:
            raise _no_such(variable, variables)


def load_settings(
    arguments: Sequence[str] | None = None, defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> Settings:
    """Read settings from flags (`--section.name VALUE`), the environment and a YAML file (`--config FILE`); where none
    of these says anything `defaults` hold, by section and name. Raises InvalidField naming what is unusable.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--config" in arguments[:-1]:
        at = arguments.index("--config")
        os.environ["COPPICE_CONFIG"] = arguments[at + 1]
        del arguments[at : at + 2]
    _check_names(arguments)
    file = os.environ.get("COPPICE_CONFIG", "")
    if file and not Path(file).is_file():
        raise InvalidField("config", f"no such file: {file}")
    try:
        given: dict[str, Any] = {name: dict(section) for name, section in (defaults or {}).items()}
        return Settings(_cli_parse_args=arguments, **given)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidField("config", f"{file} is no YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][:2])
        if first["type"] == "extra_forbidden":
            raise _no_such(where, [*Settings.model_fields, *_names()]) from None
        is_written = file and where.rpartition(".")[2] in Path(file).read_text(encoding="utf-8")
        source = f" (in {file})" if is_written else ""
        raise InvalidField(where, first["msg"].removeprefix("Value error, ") + source) from None
    except SettingsError as error:
        value = getattr(error.__cause__, "doc", None)  # of a variable that holds a list
        named = [name for name in os.environ if name.upper().startswith("COPPICE_") and os.environ[name] == value]
        raise InvalidField(named[0] if named else "settings", f"is no JSON: {error}") from None
    except (TypeError, ValueError):
        if not file:
            raise
        raise InvalidField("config", f"{file} is not a mapping of sections") from None
