"""Measures a server that speaks OpenAI's API: time to first token, inter-token latency and throughput over concurrency.

On the controller only. `measures`, `workload`, `events` and `plots` are pure; `client` alone speaks HTTP; `session`
puts a run together; `report` and `page` write it down.
"""
