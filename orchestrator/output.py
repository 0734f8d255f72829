"""What a request has answered so far: text and ids for the client, the reason of its end, and its summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coppice.errors import InvalidField
from coppice.wire.common import TopLogProbs
from coppice.wire.generation import Chunk, Finished, FinishReason, GenerationRequest, Origin, StepTree

from .step import Step
from .text import TextStream

Scored = tuple[int, float]
"""a token and its raw log-probability"""


class Output:
    """Turns committed tokens into chunks. A chunk is sent by `flush`, as soon as the step's questions are out."""

    def __init__(
        self,
        request: GenerationRequest,
        prompt_tokens: int,
        text: TextStream,
        stop_ids: frozenset[int],
        max_new_tokens: int,
        emit: Callable[[Chunk], None],
    ) -> None:
        """`emit` takes every chunk. Raises InvalidField when the request resumes behind an end."""
        self._request, self._text, self._stop_ids, self._emit = request, text, stop_ids, emit
        self._left = max_new_tokens
        self._chunk: Chunk | None = None  # certain and not sent yet
        self.finish: FinishReason | None = None
        self.result = Finished("length", prompt_tokens, 0, [], [], [])
        self._resume(request.resume_ids)

    def _resume(self, ids: Sequence[int]) -> None:
        """Take in the tokens that the client holds as if they had been made here; their text is known to it."""
        for token in ids:
            if self.finish is not None:
                raise InvalidField("resume_ids", f"go on behind the answer's end ({self.finish})")
            self._push(token)

    def _push(self, token: int) -> str:
        """Take one token; returns the text that became certain."""
        self._left -= 1
        # An id that ends the text is no part of it, whatever the tokenizer calls it.
        text, stopped = self._text.push(token) if token not in self._stop_ids else ("", False)
        if token in self._stop_ids or (self._left <= 0 and not stopped):
            self.finish = "eos" if token in self._stop_ids else "length"
            rest, stopped = self._text.flush()
            text += rest
        if stopped:
            self.finish = "stop"
        return text

    def commit(
        self,
        accepted: Sequence[Scored],
        root: Scored | None,
        top: tuple[TopLogProbs, ...],
        trees: Sequence[StepTree] = (),
    ) -> int:
        """Take the accepted drafts and the next root, up to where the text ends; returns how many were taken.

        top: the best ids in the place of each, or nothing. trees: that of the step, and those that were not chosen.
        """
        new = [(*token, Origin.DRAFT) for token in accepted]
        if root is not None:
            new.append((*root, Origin.ROOT))
        pieces: list[str] = []
        for token, _, _ in new:
            pieces.append(self._push(token))
            if self.finish is not None:
                break
        taken = new[: len(pieces)]
        self._chunk = Chunk(
            text="".join(pieces),
            ids=tuple([token for token, _, _ in taken]),
            origins=tuple([origin for _, _, origin in taken]),
            pieces=tuple(pieces),
            log_probs=tuple([log_prob for _, log_prob, _ in taken]) if self._request.want_log_probs else (),
            tree=trees[0] if trees else None,
            top=top[: len(taken)],
            others=tuple(trees[1:]),
        )
        self.result.new_tokens += len(taken)
        return len(taken)

    def flush(self) -> None:
        """Send the chunk that waits, if there is one."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            self._emit(chunk)

    def piece(self, token: int) -> str:
        """The text of a token by itself."""
        return self._text.tokens.of(token, True).decode(errors="replace")

    def account(self, step: Step) -> None:
        """Add where the step's time went and what it verified."""
        timings, times = self.result.timings, step.judged.timings
        head_ns = max([draft.forward_ns for draft in step.drafts], default=0)
        timings.draft_ns += step.draft_ns
        timings.transport_ns += step.transport_ns
        timings.verify_ns += times.total_ns - times.accept_ns
        timings.accept_ns += times.accept_ns
        timings.target_forward_ns += times.forward_ns
        timings.head_forward_ns += head_ns
        timings.step_ns.append(took_ns := step.took_ns)
        timings.split_ns.append(took_ns - times.forward_ns - head_ns)
        self.result.routed.append(step.choice.routed)
        self.result.verified_nodes.append(step.num_verified)
        for draft in step.drafts:
            self.result.late_drafts += draft.late
            self.result.bad_drafts += draft.bad

    def end(self, prefill_ns: int, decode_ns: int) -> Finished:
        """The summary of an answer that has ended."""
        timings = self.result.timings
        timings.prefill_ns, timings.decode_ns = prefill_ns, decode_ns
        elsewhere = timings.draft_ns + timings.transport_ns + timings.verify_ns + timings.accept_ns
        timings.commit_ns = max(0, decode_ns - elsewhere)
        assert self.finish
        self.result.finish_reason = self.finish
        return self.result
