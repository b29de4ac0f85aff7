"""A scheduler over memory that remembers whose KV it holds, so that a wrong block shows in the tokens.

The "KV" of position p is a number that depends on the salt, the images and every token up to p. Before a chunk runs, the
rows of all earlier positions are compared with what they must be; a sampled token depends on the last row, the seed and
the position. :func:`expected_outputs` says what a request must get, however it was chunked, cached, swapped or moved.

Put this folder on sys.path: ``sys.path.insert(0, "test/fakes")``. Standard library and vla_cloud.core only.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable

from vla_cloud.core.block_pool import BLOCK_TOKENS, BlockPool, blocks_for
from vla_cloud.core.generate import FinishReason, GenerateRequest, Priority, SamplingParams, seed_of
from vla_cloud.core.radix_tree import RadixTree
from vla_cloud.core.scheduler import Scheduler
from vla_cloud.core.sequence import SequenceState, TokenSequence
from vla_cloud.core.step_plan import Finished, Role, SchedulerConfig, StepPlan, StepResult
from vla_common.clock import ManualClock

VOCABULARY = 40
GARBAGE = -1


def chain(request: GenerateRequest, tokens: list[int]) -> list[int]:
    """The KV number of every position."""
    state = zlib.crc32(request.salt)
    rows = []
    for position, token in enumerate(tokens):
        image = next((i for i in request.images if i.start <= position < i.start + i.length), None)
        # No None and no text in what is hashed: their hashes differ from run to run.
        state = hash((state, token, 0 if image is None else 1 + image.start, zlib.crc32(image.sha256) if image else 0))
        rows.append(state)
    return rows


def next_token(request: GenerateRequest, row: int, position: int) -> int:
    """What follows the token at ``position`` whose KV number is ``row``."""
    return hash((row, seed_of(request), position)) % VOCABULARY


def expected_outputs(request: GenerateRequest, max_len: int) -> list[int]:
    """The outputs of a reference run: whole prompt at once, then one token at a time."""
    tokens = list(request.tokens)
    sampling = request.sampling
    while len(tokens) - len(request.tokens) < sampling.max_new_tokens and len(tokens) < max_len:
        tokens.append(next_token(request, chain(request, tokens)[-1], len(tokens) - 1))
        if tokens[-1] in sampling.stop_token_ids:
            break
    return tokens[len(request.tokens) :]


def request(
    request_id: str,
    tokens: int | list[int],
    new: int = 4,
    priority: Priority = Priority.NORMAL,
    stop: frozenset[int] = frozenset(),
    **more: object,
) -> GenerateRequest:
    """A request; an int makes a prompt of that length unlike those of other ids."""
    if isinstance(tokens, int):
        start = zlib.crc32(request_id.encode())
        tokens = [(start + 7 * i) % VOCABULARY for i in range(tokens)]
    sampling = SamplingParams(max_new_tokens=new, stop_token_ids=stop)
    return GenerateRequest(request_id, tuple(tokens), sampling, priority, **more)  # type: ignore[arg-type]


class Rig:
    """One worker without a model: ``step()`` plans, checks the plan, runs it on the fake memory, commits."""

    def __init__(self, blocks: int = 64, tree_blocks: int | None = None, **config: object) -> None:
        self.config = SchedulerConfig(**{"chunk_tokens": 64, "long_prefill_tokens": 128, **config})  # type: ignore[arg-type]
        self.pool = BlockPool(blocks)
        self.tree = RadixTree(self.pool, tree_blocks)
        self.clock = ManualClock()
        self.scheduler = Scheduler(self.config, self.pool, self.tree, self.clock)
        self.memory = [[GARBAGE] * BLOCK_TOKENS for _ in range(blocks)]
        self.host: dict[str, list[list[int]]] = {}
        self.finished: dict[str, Finished] = {}
        self.sequences: dict[str, TokenSequence] = {}
        self.steps = 0
        self.pushed_rows: dict[str, list[int]] = {}
        self.writers: set[str] = set()  # writers that have not ended, of reservations

    def add(self, req: GenerateRequest, writer: str | None = None, local: bool = False) -> TokenSequence:
        self.finished.pop(req.request_id, None)
        seq = self.scheduler.add(req, writer, local)
        self.sequences[req.request_id] = seq
        return seq

    # -- one step

    def step(self, meanwhile: Callable[[StepPlan], None] | None = None, fail: bool = False) -> StepResult | None:
        ready = [s for s in self.live(SequenceState.RUNNING) if s.decoding]
        plan = self.scheduler.plan()
        self.steps += 1
        self._note(plan.finished)
        self._check_plan(plan, ready)
        self.writers.update(seq.writer for seq in plan.reserved)
        self._swap(plan)
        if meanwhile is not None:
            meanwhile(plan)
        if fail and not plan.empty:
            self._scribble(plan)
            self._note(self.scheduler.discard(plan))
            return None
        sampled = {}
        for chunk in plan.prefill:
            row = self._compute(chunk.seq, chunk.start, chunk.count)
            if chunk.last:
                sampled[chunk.seq.request_id] = next_token(chunk.seq.request, row, chunk.start + chunk.count - 1)
        for seq in plan.decode:
            row = self._compute(seq, seq.computed, 1)
            sampled[seq.request_id] = next_token(seq.request, row, seq.computed)
        result = self.scheduler.commit(plan, sampled)
        self._note(result.finished)
        return result

    def run(self, limit: int = 2000) -> None:
        """Step until nothing is left to do; pushes leave, reservations arrive and writers end at once."""
        for _ in range(limit):
            if not self.scheduler.live:
                self._note(self.scheduler.plan().finished)
                return
            self.step()
            for seq in self.live(SequenceState.TO_PUSH):
                self.push(seq)
            for seq in self.live(SequenceState.RESERVED):
                self.arrive(seq)
            for writer in self.pool.writers():
                self.scheduler.acquit(writer)
        raise AssertionError(f"not done after {limit} steps: {list(self.live())}")

    # -- what other workers do

    def push(self, seq: TokenSequence) -> None:
        self.pushed_rows[seq.request_id] = self._rows(seq)[: seq.prompt_tokens]
        assert self.scheduler.pushed(seq.request_id)

    def arrive(self, seq: TokenSequence) -> bool:
        """The writer writes all lent blocks, then the notice comes."""
        if seq.state is not SequenceState.RESERVED:
            return self.scheduler.kv_arrived(seq.request_id, 0)
        rows = chain(seq.request, list(seq.request.tokens))
        for i, block in enumerate(seq.lent_blocks, start=seq.cached_tokens // BLOCK_TOKENS):
            part = rows[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
            self.memory[block][: len(part)] = part
        self.writers.discard(seq.writer)
        return self.scheduler.kv_arrived(seq.request_id, next_token(seq.request, rows[-1], len(rows) - 1))

    def late_write(self, writer: str, blocks: list[int]) -> None:
        """A writer whose reservation is gone writes all the same."""
        if writer in self.writers:
            for block in blocks:
                self.memory[block] = [GARBAGE] * BLOCK_TOKENS

    # -- looking

    def live(self, *states: SequenceState) -> list[TokenSequence]:
        scheduler = self.scheduler
        found = [seq for seq in self.sequences.values() if scheduler.get(seq.request_id) is seq]
        return [seq for seq in found if not states or seq.state in states]

    def check(self) -> None:
        """Every block is accounted for, exactly."""
        pool, tree = self.pool, self.tree
        assert pool.free + pool.used + pool.quarantined == pool.total
        in_tree = tree_blocks(tree)
        tables = Counter(block for seq in self.live() for block in seq.table)
        for block in range(pool.total):
            assert pool.refcount(block) == tables[block] + (block in in_tree), f"block {block}"
            if tables[block] > 1:
                assert block in in_tree, f"block {block} has two owners and is not a shared prefix"
        assert len(in_tree) == tree.size <= pool.total
        assert tree.evictable == sum(not locked for locked in in_tree.values())
        for block, locked in in_tree.items():
            assert locked or pool.refcount(block) == 1, "an unlocked tree block has another holder"
        for seq in self.live():
            assert len(seq.table) >= blocks_for(seq.computed)
            assert not any(pool.is_quarantined(block) for block in seq.table)
            holds = seq.state in (SequenceState.RUNNING, SequenceState.RESERVED, SequenceState.TO_PUSH)
            assert bool(seq.table) == holds

    def check_baseline(self) -> None:
        """Nothing lives: all blocks free or in the cache, and the cache lets go of all."""
        self.check()
        assert self.scheduler.live == 0
        for writer in self.pool.writers():
            self.scheduler.acquit(writer)
        self.writers.clear()
        assert self.pool.free + self.tree.evictable == self.pool.total
        self.tree.clear()
        assert self.pool.free == self.pool.total and self.tree.size == 0
        assert not self.host

    def check_outputs(self, request_id: str) -> None:
        """A finished request has exactly the reference outputs, any other a prefix of them."""
        seq = self.sequences[request_id]
        expected = expected_outputs(seq.request, self.scheduler.max_len)
        end = self.finished.get(request_id)
        if end is not None and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert seq.outputs == expected
        else:
            assert seq.outputs == expected[: seq.num_outputs]

    # -- inside

    def _check_plan(self, plan: StepPlan, ready: list[TokenSequence]) -> None:
        config = self.config
        assert sum(chunk.count for chunk in plan.prefill) <= config.chunk_tokens
        assert len(plan.decode) <= config.max_running
        assert len({seq.request_id for seq in plan.decode}) == len(plan.decode)
        in_chunks = [c.seq for c in plan.prefill]
        assert not {s.request_id for s in in_chunks} & {s.request_id for s in plan.decode}
        chat = [c for c in plan.prefill if c.seq.priority is not Priority.ROBOT]
        assert len(chat) <= config.max_partial_prefills
        ready = [seq for seq in ready if seq.state is SequenceState.RUNNING]
        rows = sorted(ready, key=lambda seq: seq.rank)[: config.max_running]
        assert plan.decode == rows, "a decode row was left out for something else"
        for chunk in plan.prefill:
            assert chunk.count >= 1 and chunk.start == chunk.seq.computed
            assert blocks_for(chunk.start + chunk.count) <= len(chunk.seq.table)
        written = [(s, s.computed) for s in plan.decode] + [(c.seq, c.start) for c in plan.prefill]
        targets: list[int] = []
        for seq, start in written:
            end = next((c.start + c.count for c in plan.prefill if c.seq is seq), start + 1)
            targets += seq.table[start // BLOCK_TOKENS : blocks_for(end)]
        assert len(set(targets)) == len(targets), "two sequences write one block"
        assert all(self.pool.refcount(b) == 1 for b in targets), "a step writes a block that others hold"

    def _swap(self, plan: StepPlan) -> None:
        for out in plan.swap_out:
            assert out.seq.request_id not in self.host
            self.host[out.seq.request_id] = [list(self.memory[block]) for block in out.blocks]
        for back in plan.swap_in:
            rows = self.host.pop(back.seq.request_id)[back.skip :]
            for block, row in zip(back.blocks, rows, strict=bool(back.blocks)):
                self.memory[block] = row
        assert sum(len(copy) for copy in self.host.values()) <= self.config.host_blocks

    def _rows(self, seq: TokenSequence) -> list[int]:
        return [row for block in seq.table for row in self.memory[block]]

    def _compute(self, seq: TokenSequence, start: int, count: int) -> int:
        rows = chain(seq.request, seq.tokens[: start + count])
        assert self._rows(seq)[:start] == rows[:start], f"{seq}: KV of other tokens"
        for position in range(start, start + count):
            self.memory[seq.table[position // BLOCK_TOKENS]][position % BLOCK_TOKENS] = rows[position]
        return rows[-1]

    def _scribble(self, plan: StepPlan) -> None:
        """What a failed step may have left: garbage wherever it was to write."""
        for chunk in plan.prefill:
            for position in range(chunk.start, chunk.start + chunk.count):
                self.memory[chunk.seq.table[position // BLOCK_TOKENS]][position % BLOCK_TOKENS] = GARBAGE
        for out in plan.swap_out:
            self.host.pop(out.seq.request_id, None)
        for back in plan.swap_in:
            for block in back.blocks:
                self.memory[block] = [GARBAGE] * BLOCK_TOKENS

    def _note(self, finished: list[Finished]) -> None:
        for end in finished:
            assert end.request_id not in self.finished, f"{end.request_id} ended twice"
            self.finished[end.request_id] = end
            self.host.pop(end.request_id, None)
            assert (end.error is None) == (end.reason not in (FinishReason.ABORTED, FinishReason.ERROR))
            assert (end.quarantined_writer is not None) <= (self.config.role is Role.DECODE)


def tree_blocks(tree: RadixTree) -> dict[int, bool]:
    """Block -> locked, of every node."""
    found: dict[int, bool] = {}
    pending = [child for root in tree._roots.values() for child in root.children.values()]
    while pending:
        node = pending.pop()
        assert node.block not in found, "one block in two nodes"
        found[node.block] = node.locks > 0
        for child in node.children.values():
            assert node.locks >= child.locks or not child.locks
            pending.append(child)
    return found
