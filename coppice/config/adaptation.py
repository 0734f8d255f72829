"""Settings of online adaptation: what is told to the adapter, what it decides by, and how an update learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

from coppice.config.sections import RedisSettings, Section, check_pairs
from coppice.limits import MAX_TOP_N, MAX_WINDOW
from coppice.speculation.sampling import MASK_64


class AdaptationSettings(RedisSettings):
    """What is told to the adapter, by way of Redis."""

    redis: str = Field("", description="redis://, rediss:// or unix:// URL of the adapter's Redis; empty: tell nothing")
    queue_entries: int = Field(4096, gt=0, description="records waiting to be sent; more are dropped and counted")
    queue_bytes: int = Field(64 << 20, gt=0, description="the same in bytes")
    entry_bytes: int = Field(8 << 20, gt=0, description="largest record, bytes; larger ones are dropped and counted")
    bytes_per_s: int = Field(32 << 20, gt=0, description="bytes sent a second; what exceeds it is dropped and counted")
    queries_kept: int = Field(10_000, gt=0, description="query records a stream keeps, about")
    samples_kept: int = Field(4096, gt=0, description="training samples a stream keeps, about")
    stream_bytes: int = Field(256 << 20, gt=0, description="bytes of training samples a stream keeps, about")
    window: int = Field(64, gt=1, le=MAX_WINDOW, description="positions of a full training sample")
    stride: int = Field(32, gt=0, description="least positions between the full samples of one session")
    top_n: int = Field(32, ge=0, le=MAX_TOP_N, description="the target's likeliest ids told with a rejection")


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
    head_samples: int = Field(256, gt=0, description="samples of a head-only update")
    full_samples: int = Field(32, gt=0, description="samples of a full update")
    threads: int = Field(1, ge=1, le=1024, description="torch threads of training")
    nice: int = Field(19, ge=0, le=19, description="how far training yields to others on the machine's cores")
    poll_s: float = Field(2.0, gt=0, description="time between two looks at the replicas, seconds")

    @field_validator("heads", "drafters")
    @classmethod
    def _arecheck_pairs(cls, pairs: list[str]) -> list[str]:
        return check_pairs(pairs, "NAME=VALUE")


class LearnerSettings(Section):
    """How an update learns. Rates are AdamW's."""

    head_rate: float = Field(1e-4, gt=0, description="learning rate of head-only updates")
    full_rate: float = Field(1e-3, gt=0, description="learning rate of full updates")
    head_passes: int = Field(1, gt=0, description="times that a head-only update reads its samples")
    full_passes: int = Field(2, gt=0, description="times that a full update reads its samples")
    batch: int = Field(8, gt=0, description="samples of each optimiser step")
    clip: float = Field(0.5, gt=0, description="largest norm of a gradient")
    penalty: float = Field(0.01, ge=0, description="lambda, weight of the KL to the head as it was deployed")
    blocks: int = Field(1, gt=0, le=4, description="blocks that a SpecBlock head learns from each row")
    steps: int = Field(7, gt=0, le=32, description="steps that an EAGLE-3 head learns from each row")
    every: int = Field(3, gt=0, description="later blocks start from every so many rows")
    valid_prefix: bool = Field(False, description="whether a slot learns only behind right ones (equation 5)")
    device: str = Field("cpu", description="torch device, such as cpu or cuda:1")
    seed: int = Field(0, ge=0, description="seed of the order of samples")


PolicyName = Literal["bandit", "always", "full-only", "head-only", "never"]


Chance = Annotated[float, Field(ge=0, le=1)]


class BanditSettings(Section):
    """The numbers of the bandit; the defaults are the paper's where it gives them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    policy: PolicyName = Field(
        "bandit",
        description="bandit; full-only and head-only are bandits of one action; always: online speculative decoding",
    )
    seed: int = Field(0, ge=0, le=MASK_64, description="seed of its chances")
    warmup_queries: NonNegativeInt = Field(
        10, description="queries that only measure, and least measured before events"
    )
    cold_events: NonNegativeInt = Field(8, description="events of the cold start")
    epsilon_first: Chance = Field(0.30, description="chance of a random action at the first event of the cold start")
    epsilon_last: Chance = Field(0.10, description="the same at the last one; linear in between")
    exploration: Chance = Field(0.003, description="chance that a query after the cold start begins a random event")
    certainty: NonNegativeFloat = Field(
        1.5,
        description="standard errors by which a value must be positive after the cold start; 0: the paper's bare rule",
    )
    alpha: float = Field(0.10, gt=0, le=1, description="weight of a new observation in a value")
    least_signal: NonNegativeFloat = Field(5.0, description="s of a trigger below which its observation is not used")
    interval: PositiveInt = Field(20, description="N, queries measured before and after an event")
    horizon: PositiveInt = Field(
        100, description="queries an update is to pay in: what those beside the training lost is spread over them"
    )
    patience: PositiveInt = Field(200, description="queries among which N comparable ones must be found")
    load_factor: float = Field(1.5, ge=1, description="ratio of loads up to which queries are comparable")
    blocked_queries: NonNegativeInt = Field(2, description="queries after an event that trigger nothing")
    always_queries: PositiveInt = Field(8, description="policy always: queries from one event to the next")


class DriftSettings(Section):
    """The numbers of drift control; the defaults are the paper's where it gives them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    window: int = Field(20, ge=2, description="queries of a window")
    windows: int = Field(3, ge=2, description="consecutive windows over which tau must fall")
    certainty: NonNegativeFloat = Field(
        2.5, description="standard errors that a fall of tau must exceed; 0: the paper's bare rule"
    )
    collapse: float = Field(
        0.5, ge=0, le=1, description="share of the last good window's tau - 1 below which one window is an alarm"
    )
    canary_queries: int = Field(10, ge=2, description="queries of either version before a canary is judged")
    canary_limit: int = Field(40, ge=2, description="queries of the new version after which a canary must be decided")
    canary_tolerance: NonNegativeFloat = Field(0.03, description="share of the old tau that a new version may lack")
    canary_certainty: NonNegativeFloat = Field(2.0, description="standard errors that decide a canary before the limit")
