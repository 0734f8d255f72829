"""Settings of online adaptation: what is told to the adapter, what it decides by, and how an update learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

from coppice.config.sections import RedisSettings, Section, check_pairs
from coppice.limits import MAX_VARIANTS, MAX_WINDOW
from coppice.speculation.sampling import MASK_64


class AdaptationSettings(RedisSettings):
    """What is told to the adapter, by way of Redis."""

    redis: str = Field("", description="redis://, rediss:// or unix:// URL of the adapter's Redis; empty: tell nothing")
    stream_bytes: int = Field(256 << 20, gt=0, description="bytes of training samples a stream keeps, about")
    window: int = Field(64, gt=1, le=MAX_WINDOW, description="positions of a full training sample")
    stride: int = Field(32, gt=0, description="least positions between the full samples of one session")


class AdapterSettings(Section):
    """The adapter: which heads it trains, where, and what it keeps."""

    target: str = Field("", description="folder of the target, whose embedding the heads share")
    heads: list[str] = Field(default_factory=list, description="NAME=DIR of each head, its weights as deployed")
    drafters: list[str] = Field(
        default_factory=list, description="NAME=HOST:PORT of each drafter, NAME=dns:HOST:PORT or NAME=redis of them all"
    )
    lease_s: float = Field(10.0, ge=0.5, le=300, description="how long after the active adapter another one takes over")
    folder: str = Field("", description="folder for versions and state; empty: a temporary one, forgotten at the end")
    versions_kept: int = Field(8, ge=2, description="weight versions kept on disk for each head")
    canary: bool = Field(True, description="whether new weights go to one replica first, where there are several")
    variants: int = Field(
        4, ge=1, le=MAX_VARIANTS, description="variants of a head beside the deployed one, under policy bandit"
    )
    cpu_share: float = Field(
        0.25, gt=0, le=1, description="largest share of the time that an update of policy bandit computes"
    )
    head_samples: int = Field(256, gt=0, description="samples of a head-only update")
    full_samples: int = Field(32, gt=0, description="samples of a full update")
    threads: int = Field(1, ge=1, le=1024, description="torch threads of training")
    poll_s: float = Field(2.0, gt=0, description="time between two looks at the replicas, seconds")

    @field_validator("heads", "drafters")
    @classmethod
    def _arecheck_pairs(cls, pairs: list[str]) -> list[str]:
        return check_pairs(pairs, "NAME=VALUE")


class LearnerSettings(Section):
    """How an update learns. Rates are AdamW's."""

    head_rate: float = Field(1e-4, gt=0, description="learning rate of head-only updates")
    full_rate: float = Field(1e-3, gt=0, description="learning rate of full updates")
    device: str = Field("cpu", description="torch device, such as cpu or cuda:1")


PolicyName = Literal["bandit", "paper", "always", "full-only", "head-only", "never"]


Chance = Annotated[float, Field(ge=0, le=1)]


class BanditSettings(Section):
    """The numbers of the bandit; the defaults are the paper's where it gives them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    policy: PolicyName = Field(
        "bandit",
        description="bandit: variants for kinds of text; paper: SpecBlock's, which overwrites the head; full-only and "
        "head-only are paper's with one action; always: online speculative decoding",
    )
    seed: int = Field(0, ge=0, le=MASK_64, description="seed of its chances")
    warmup_queries: NonNegativeInt = Field(
        10, description="queries that only measure, and least measured before events"
    )
    cold_events: NonNegativeInt = Field(8, description="events of the cold start")
    exploration: Chance = Field(0.003, description="chance that a query after the cold start begins a random event")
    certainty: NonNegativeFloat = Field(
        1.5,
        description="standard errors by which a value must be positive after the cold start; 0: the paper's bare rule",
    )
    alpha: float = Field(0.10, gt=0, le=1, description="weight of a new observation in a value")
    interval: PositiveInt = Field(20, description="N, queries measured before and after an event")
    horizon: PositiveInt = Field(
        100, description="queries an update is to pay in: what those beside the training lost is spread over them"
    )


class DriftSettings(Section):
    """The numbers of drift control; the defaults are the paper's where it gives them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    window: int = Field(20, ge=2, description="queries of a window")
    certainty: NonNegativeFloat = Field(
        2.5, description="standard errors that a fall of tau must exceed; 0: the paper's bare rule"
    )
    canary_queries: int = Field(10, ge=2, description="queries of either version before a canary is judged")
