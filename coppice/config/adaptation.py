"""Settings of online adaptation: what processes send to the adapter, and what it does."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from coppice.config.sections import RedisSettings, Section, check_pairs


class AdaptationSettings(RedisSettings):
    """The way of signals to the adapter: a Redis."""

    redis: str = Field("", description="redis://, rediss:// or unix:// URL of the adapter's Redis; empty: send nothing")


PolicyName = Literal["bandit", "paper", "always", "full-only", "head-only"]


class AdapterSettings(Section):
    """The adapter: which heads it trains, where, and by which rule."""

    target: str = Field("", description="folder of the target, whose embedding the heads share")
    heads: list[str] = Field(default_factory=list, description="NAME=DIR of each head, its weights as deployed")
    drafters: list[str] = Field(
        default_factory=list, description="NAME=HOST:PORT of each drafter, NAME=dns:HOST:PORT or NAME=redis of them all"
    )
    folder: str = Field("", description="folder for versions and state; empty: a temporary one, forgotten at the end")
    policy: PolicyName = Field(
        "bandit",
        description="bandit: variants for kinds of text; paper: SpecBlock's rule, one variant for all; full-only and "
        "head-only are paper's with one action; always: online speculative decoding",
    )
    interval: int = Field(
        20, ge=2, description="queries that the other policies measure before and after an update of as many texts"
    )
    cpu_share: float = Field(0.25, gt=0, le=1, description="largest share of the time that an update computes")
    device: str = Field("cpu", description="torch device of training, such as cpu or cuda:1")

    @field_validator("heads", "drafters")
    @classmethod
    def _are_pairs(cls, pairs: list[str]) -> list[str]:
        return check_pairs(pairs, "NAME=VALUE")
