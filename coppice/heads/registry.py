"""The builder of each kind of head. A kind's module, and torch with it, is imported only when it is built."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import MappingProxyType

import structlog

from coppice.config.model import text_config
from coppice.config.sections import HEADS, DrafterSettings
from coppice.errors import CoppiceError, InvalidField
from coppice.heads.base import Head
from coppice.machine import extension
from coppice.telemetry import WARMING_UP

log = structlog.get_logger()

# kind: (module, function that takes DrafterSettings and returns a Head)
_BUILDERS = MappingProxyType(
    {
        **dict.fromkeys(("bigram", "lookup"), ("coppice.heads.ngram", "NgramHead")),
        "lm": ("coppice.heads.lm", "LanguageModelHead"),
        "eagle3": ("coppice.heads.block_head", "Eagle3Head"),
        "specblock": ("coppice.heads.block_head", "SpecBlockHead"),
        **dict.fromkeys(("dflash", "jetspec", "dspark"), ("coppice.heads.block_head", "MaskedBlockHead")),
    }
)


def build_head(settings: DrafterSettings) -> Head:
    """Build the head of `settings.kind`. Raises as our builder does, and InvalidField whatever a package's raises."""
    if settings.kind in _BUILDERS:
        module, function = _BUILDERS[settings.kind]
        head: Head = getattr(import_module(module), function)(settings)
        return head
    builder: Callable[[DrafterSettings], Head] = extension(HEADS, settings.kind, "drafter.kind")
    try:
        return builder(settings)
    except CoppiceError:
        raise
    except Exception as error:
        log.exception("the head cannot be built", kind=settings.kind)
        reason = f"{settings.kind} cannot be built: {type(error).__name__}: {' '.join(str(error).split())}"
        raise InvalidField("drafter.kind", reason) from None


def served_head(settings: DrafterSettings) -> Head:
    """Build the head as a drafter serves it, warmed up. Raises what `build_head` raises."""
    head = build_head(settings)
    tokens = text_config(settings.target).get("max_position_embeddings") or 0 if settings.target else 0
    if 0 < head.max_context < tokens:
        log.warning("the head drafts nothing for longer texts", tokens=head.max_context, target=tokens)
    log.info(WARMING_UP)
    head.warm_up()
    return head
