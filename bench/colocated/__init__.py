"""Several instances on one machine under contention: what `bench/contention.py` is made of.

Pure and small: `workload` (who asks for what, when), `order` (which run comes when),
`statistics` (percentiles, ratios), `result` (the JSON other tools read). People's side:
`table`, `plot`. The work: `conductor` plays a workload on a `fleet` of instances, each a
process of its own (`instance`) around an engine (`vllm_engine`, or `sim_engine` with a
timed stand-in for the model). `policies` says how an instance is started under each policy;
`sync_policy/` is the design kvadmit replaces.

Path of one request: `conductor` sends its burst over a pipe, a client inside the instance's
process submits it and times its tokens, the outcome comes back as one JSON line.
"""
