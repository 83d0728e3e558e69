"""Model loader: ``--load-format qpn`` of vLLM."""

from __future__ import annotations

import logging

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from loader.checkpoint.folder import Checkpoint, open_checkpoint
from loader.checkpoint.hub import HubSource, locate
from loader.checkpoint.source import Source
from loader.errors import LoaderError, UnsupportedError
from loader.integrations.vllm.settings import Settings, read_settings
from loader.integrations.vllm.support import require_support

LOG = logging.getLogger("vllm.qpn_loader")


class QpnModelLoader(BaseModelLoader):
    """Builds the model without expert parameters, then fills it from the checkpoint.

    Raises a :class:`loader.LoaderError`, logged as one sentence before vLLM's own traceback.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._checkpoint: Checkpoint | None = None
        self.settings = Settings()
        with _told():
            require_support()
            self.settings = read_settings(load_config.model_loader_extra_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the files of the model into the Hub's cache, where it is no folder."""
        with _told(), _source(model_config) as source:
            if isinstance(source, HubSource):
                source.fetch()

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        """Build and fill one model."""
        # Imported here: they use classes of vLLM's that `require_support` has found.
        from loader.integrations.vllm.quantization import take_over

        with _told():
            _refuse_drafts(model_config)
            with _source(model_config) as source:
                self._checkpoint = open_checkpoint(source)
                try:
                    model: torch.nn.Module = super().load_model(
                        vllm_config=take_over(vllm_config),
                        model_config=model_config,
                        prefix=prefix,
                    )
                    return model
                finally:
                    self._checkpoint = None

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill the model that :meth:`load_model` has built."""
        from loader.integrations.vllm.filling import fill

        if self._checkpoint is None:
            raise UnsupportedError(
                "weights cannot be loaded again into a running model by --load-format qpn",
                expected="a new server",
                found="a reload",
            )
        fill(model, self._checkpoint, self.settings)


def _source(config: ModelConfig) -> Source:
    return locate(str(config.model), config.revision)


def _refuse_drafts(config: ModelConfig) -> None:
    if config.runner == "draft":
        raise UnsupportedError(
            "a speculative draft model is not loaded by --load-format qpn",
            expected='"draft_load_config": {"load_format": "auto"} in --speculative-config',
            found=str(config.model),
        )


class _told:
    """Logs an error of the library as one line: vLLM prints a traceback of every process."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, LoaderError):
            LOG.error("%s", error)
