"""vLLM: ``vllm serve DIR --load-format qpn``, a plugin outside of vLLM's own tree.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its
processes. Nothing here is imported before that, and nothing of the load before a load is asked.
"""

from __future__ import annotations

import logging

LOAD_FORMAT = "qpn"
LOG = logging.getLogger("vllm.qpn_loader")


def register() -> None:
    """Make the load format known to vLLM. Never raises: a server that does not ask for it is left
    alone, whatever its vLLM looks like."""
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from loader.integrations.vllm.model_loader import QpnModelLoader

        register_model_loader(LOAD_FORMAT)(QpnModelLoader)
    except (ImportError, AttributeError, TypeError) as error:
        from loader.integrations.vllm.support import SUPPORTED

        LOG.error(
            "--load-format %s is not there: this vLLM is not one that qpn-loader supports (%s): %s",
            LOAD_FORMAT,
            ", ".join(f"{one}.*" for one in SUPPORTED),
            error,
        )
