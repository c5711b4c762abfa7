"""A real vLLM engine as a process of its own, driven by lines of JSON.

    python engine_child.py <descriptor> '<engine arguments as JSON>'

Answers on the descriptor, because vLLM writes to stdout and stderr. The first answer says
that the engine is up, or why it is not.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "plugins"))
differing = importlib.import_module("differing_plugin").differing


def main() -> None:
    """Build the engine, then answer requests until stdin ends."""
    descriptor, arguments = int(sys.argv[1]), json.loads(sys.argv[2])
    with os.fdopen(descriptor, "w", buffering=1) as answers:
        try:
            engine = make_engine(arguments)
        except BaseException as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            answers.write(json.dumps({"error": reason, "differs": differing()}) + "\n")
            sys.exit(1)
        answers.write(json.dumps({"ready": True, "differs": differing()}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(answer(engine, json.loads(line))) + "\n")


def make_engine(arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(**arguments)


def answer(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request."""
    match request["op"]:
        case "generate":
            return generate(llm, request["prompts"], request["tokens"])
        case "structured":
            return structured(llm, request["choices"], request["count"])
        case "add":
            return add(llm, request["requests"], request["tokens"])
        case "steps":
            return {"steps": [step(llm) for _ in range(request["count"])]}
        case "abort":
            llm.llm_engine.abort_request(request["ids"])
            return {}
        case "preempt":
            return {"reset": llm.llm_engine.reset_prefix_cache(reset_running_requests=True)}
        case "status":
            return status(llm)
        case "reset":
            return {"reset": llm.reset_prefix_cache()}
        case "differing":
            return ask_elsewhere(llm, "tests_differing", _differing_in_worker)
        case "started":
            return ask_elsewhere(llm, "tests_started", _started_in_worker)
        case "another":
            other = make_engine(request["arguments"])
            answered = generate(other, request["prompts"], request["tokens"])
            return answered | {"status": status(other)}
        case "length":
            return {"max_model_len": llm.llm_engine.model_config.max_model_len}
        case other:
            raise ValueError(other)


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Return greedy token ids, why each request ended, and what vLLM says of a failure."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    first = [output.outputs[0] for output in outputs]
    return {
        "ids": [list(one.token_ids) for one in first],
        "finish": [one.finish_reason for one in first],
        "stop": [one.stop_reason for one in first],
    }


def add(llm: Any, requests: dict[str, list[int]], tokens: int) -> dict[str, Any]:
    """Queue prompts under the ids that are their keys; `step` serves them."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for name, prompt in requests.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    return {}


def step(llm: Any) -> dict[str, Any]:
    """Make one step of an in-process engine; returns who ended and who holds what after it."""
    ended = {
        output.request_id: {
            "ids": list(output.outputs[0].token_ids),
            "finish": output.outputs[0].finish_reason,
            "cached": output.num_cached_tokens,
        }
        for output in llm.llm_engine.step()
        if output.finished
    }
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    blocks = {name: manager.get_block_ids(name) for name in scheduler.requests}
    return {
        "ended": ended,
        "running": [outer_name(request.request_id) for request in scheduler.running],
        "waiting": [outer_name(request.request_id) for request in scheduler.waiting],
        "blocks": {outer_name(name): sum(map(len, groups)) for name, groups in blocks.items()},
        "held": len({one for groups in blocks.values() for group in groups for one in group}),
        "free": manager.block_pool.get_num_free_blocks(),
        "resident": manager.block_pool.num_gpu_blocks,
    }


def outer_name(name: str) -> str:
    """Return the id that a request came with: vLLM adds eight characters of its own."""
    return name.rpartition("-")[0]


def structured(llm: Any, choices: list[str], count: int) -> dict[str, Any]:
    """Return what the model says when it may say one of `choices` only, `count` times."""
    from vllm.sampling_params import StructuredOutputsParams

    from vllm import SamplingParams

    wanted = StructuredOutputsParams(choice=choices)
    sampling = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=wanted)
    prompts = [f"number {number}" for number in range(count)]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {"texts": [output.outputs[0].text for output in outputs]}


def status(llm: Any) -> dict[str, Any]:
    """Return `EngineCore.kvadmit_status`, wherever the engine lives."""
    client = llm.llm_engine.engine_core
    inside = getattr(client, "engine_core", None)
    found: dict[str, Any] = (
        inside.kvadmit_status() if inside is not None else client.call_utility("kvadmit_status")
    )
    return found


def ask_elsewhere(llm: Any, utility: str, of_worker: Any) -> dict[str, Any]:
    """Return what EngineCore's and each worker's process answer."""
    client = llm.llm_engine.engine_core
    inside = getattr(client, "engine_core", None)
    return {
        "engine_core": getattr(inside, utility)()
        if inside is not None
        else client.call_utility(utility),
        "workers": llm.collective_rpc(of_worker),
    }


def _differing_in_worker(worker: Any) -> list[str]:
    found: list[str] = importlib.import_module("differing_plugin").differing()
    return found


def _started_in_worker(worker: Any) -> str:
    return str(importlib.import_module("differing_plugin").started())


if __name__ == "__main__":
    main()
