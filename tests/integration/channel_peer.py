"""A peer as a process of its own: says hello, answers orders, tells what it saw as JSON lines.

`python channel_peer.py ENDPOINT LEASE_PATH` runs until its lease ends.
"""

from __future__ import annotations

import json
import sys

from kvadmit.agent_channel import AgentPoller, BlockingDealer, LeaseLost, Received
from kvadmit.lease import LeaseLine
from kvadmit.messages import Allowance, Answer, MapGrant, StatusQuery
from kvadmit.rundir import new_incarnation

WAIT_S = 60.0


def tell(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(endpoint: str, lease_path: str) -> None:
    name = new_incarnation("agent")
    lease = LeaseLine.open(lease_path, name)
    dealer = BlockingDealer(endpoint, name, lease.server)
    poller = AgentPoller(dealer, lease)
    dealer.send(StatusQuery())
    tell(name)
    orders: list[int] = []
    while True:
        for ready in poller.wait(WAIT_S):
            if isinstance(ready, Received) and isinstance(ready.message, MapGrant):
                order = ready.message.order
                orders.append(order)
                dealer.send(
                    Answer(order=order, rank=0, kind="prepare", outcome="done", done=((order, 1),))
                )
            elif isinstance(ready, Received) and isinstance(ready.message, Allowance):
                tell([ready.message.revision, ready.header.sequence])
            elif isinstance(ready, LeaseLost):
                tell(orders)
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
