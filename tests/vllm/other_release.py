"""`engine_child.py` as of a release that speaks another protocol, in all of its processes."""

from __future__ import annotations

import importlib

from kvadmit import channel, messages

# Not under `__main__`: the processes that vLLM spawns import this file under another name.
for module in (messages, channel):
    vars(module)["PROTOCOL_VERSION"] += 6

if __name__ == "__main__":
    importlib.import_module("engine_child").main()
