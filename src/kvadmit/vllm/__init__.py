"""The door to vLLM: the plugin's entry point and every hook behind it.

Owns: everything that imports vLLM. `install` says which attribute is replaced by what and in
which process; `engine_config` turns a user's flag into a configuration; `engine_core`,
`planning`, `scheduler` and `parking` work in EngineCore, `worker` and `backends` in the
workers, `frontend` where requests come in. `shapes` refuses a vLLM whose hooks changed and
`gates` a feature that cannot work yet.

Path of one start: `vllm serve` loads general plugins -> `register` wraps
`EngineArgs.create_engine_config` -> a configuration with kvadmit enabled marks the
environment -> EngineCore and workers, which load the same plugins, install their hooks.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of `vllm.general_plugins`: called once in every process of vLLM's.

    Replaces one attribute unless an ancestor process has kvadmit enabled. Idempotent, cheap,
    starts nothing.
    """
    from kvadmit.vllm import install

    install.register()


__all__ = ["register"]
