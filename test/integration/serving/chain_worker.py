"""A real worker process (engine, scheduler, connector, link) over the hash-chain runner instead of a model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vla_cloud.engine.grammar_xgrammar import XGrammarBackend
from vla_cloud.engine.grammars import GrammarBackend
from vla_cloud.pools import worker_process
from vla_cloud.pools.worker_main import Loaded, MakePool, main
from vla_cloud.pools.worker_settings import WorkerSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))
from kv_chain_runner import VOCAB, KvChainRunner, chain_layout


def load(settings: WorkerSettings, make_pool: MakePool) -> Loaded:
    if settings.model == "unloadable":
        raise ValueError("no such model")
    if settings.model == "crash":
        raise RuntimeError("the model broke")
    if "CHAIN_OTHER_VERSION" in os.environ:
        worker_process.PROTOCOL_VERSION += 1
    layout = chain_layout(model_hash=os.environ.get("CHAIN_MODEL_HASH", "chain"))
    memory = make_pool(layout)
    runner = KvChainRunner(
        layout=layout, kv=memory.array, max_model_len=int(os.environ.get("CHAIN_MAX_MODEL_LEN", "512")),
        token_s=float(os.environ.get("CHAIN_TOKEN_S", "0")), step_s=float(os.environ.get("CHAIN_STEP_S", "0")),
    )  # fmt: skip
    return Loaded(runner, memory, (), _grammars())


def _grammars() -> GrammarBackend | None:
    """CHAIN_GRAMMARS: the folder of a tokenizer for the real ones, or "counting" for some that need no library."""
    wanted = os.environ.get("CHAIN_GRAMMARS", "")
    if wanted == "counting":
        from grammar_walk import CountingBackend

        return CountingBackend()
    return XGrammarBackend(wanted, VOCAB) if wanted else None


if __name__ == "__main__":
    sys.exit(main(load=load))
