"""The builder of each kind of head. A kind's module, and torch with it, is imported only when it is built."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import MappingProxyType

import structlog

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
    """Build the head of `settings.kind`, ours or a package's. Raises what our builder raises and, for whatever a
    package's raises, InvalidField.
    """
    builder: Callable[[DrafterSettings], Head]
    if settings.kind in _BUILDERS:
        module, function = _BUILDERS[settings.kind]
        builder = getattr(import_module(module), function)
        return builder(settings)
    builder = extension(HEADS, settings.kind, "drafter.kind")
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
    if settings.target and head.max_context:
        from coppice.heads.lm import context_of

        if head.max_context < (tokens := context_of(settings.target, head.max_context)):
            log.warning("the head drafts nothing for longer texts", tokens=head.max_context, target=tokens)
    log.info(WARMING_UP)
    head.warm_up()
    return head
