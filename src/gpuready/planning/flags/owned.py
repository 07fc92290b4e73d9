"""Flags that gpuready sets itself, or that hold what no file may: by engine, each with what to do instead."""

from __future__ import annotations

_HERE = "remove it"
_ONE_SERVER = "remove it: a replica's processes are all on one server"
_TLS = "remove it: the gateway speaks TLS"
_DRAWN = "remove it: gpus says which ones, and the plan how many replicas there are"

OWN: dict[str, dict[str, str]] = {
    "vllm": {
        **dict.fromkeys(("model", "served-model-name", "host", "port", "uds", "config", "root-path", "fd"), _HERE),
        "shutdown-timeout": "remove it: the unit's time to stop is made from the same number",
        "trust-remote-code": "set trust_remote_code of the deployment",
        **dict.fromkeys(("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "enable-ssl-refresh"), _TLS),
        **dict.fromkeys(("data-parallel-size", "data-parallel-rank", "data-parallel-start-rank"), _DRAWN),
        **dict.fromkeys(("data-parallel-size-local", "data-parallel-external-lb", "data-parallel-hybrid-lb"), _DRAWN),
        **dict.fromkeys(
            (
                *("nnodes", "node-rank", "master-addr", "master-port", "headless", "data-parallel-address"),
                *("data-parallel-rpc-port", "data-parallel-backend", "distributed-executor-backend"),
            ),
            _ONE_SERVER,
        ),
    },
    "sglang": {
        **dict.fromkeys(("model-path", "model", "served-model-name", "host", "port", "config"), _HERE),
        "trust-remote-code": "set trust_remote_code of the deployment",
        **dict.fromkeys(("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-keyfile-password"), _TLS),
        **dict.fromkeys(("data-parallel-size", "base-gpu-id", "gpu-id-step", "load-balance-method"), _DRAWN),
        **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr", "nccl-port", "use-ray"), _ONE_SERVER),
    },
    "tensorrt_llm": {
        **dict.fromkeys(("model", "host", "port", "backend"), _HERE),
        "trust_remote_code": "set trust_remote_code of the deployment",
        "gpus_per_node": _ONE_SERVER,
    },
}
"""Placement, readiness, gateway and drain rely on them."""

SECRET = {
    *("api-key", "hf-token", "admin-api-key", "ssl-keyfile-password", "api_key", "hf_token"),
}
"""Flags that hold secrets: a rendered file is no place for them."""
