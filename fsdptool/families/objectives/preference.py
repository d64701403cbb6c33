"""Preferences: between two answers to a prompt (ORPO, SimPO, DPO), and of single answers (APO)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.common import IGNORED, require
from fsdptool.families.objectives.language import CausalLM
from fsdptool.families.protocol import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe


class Preference(CausalLM):
    """What preference losses share. Batch: ``input_ids`` and ``labels`` [B, 2, S], chosen then rejected.

    Labels are aligned with the inputs; those of the prompt are -100. A sample has ``sequences`` answers: two,
    or one, whose batch is [B, S]. All B * ``sequences`` of them run in one forward. Losses are summed over
    samples.
    """

    unit = "pairs"
    samples: str | None = "preferences"
    sequences = 2
    single_length = False
    splits_sequences = False
    fuses_head = False
    scores_tokens = True

    def __init__(self, chunk: int = 1024, auxiliary: float | None = None) -> None:
        super().__init__(chunk, auxiliary=auxiliary)

    @classmethod
    def batch(cls, config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return tokens and labels of both answers, each with its prompt as long as the recipe says."""
        tokens, labels = super().batch(config, recipe)[:2]
        pairs, length = tokens.shape
        return tuple(
            TensorSpec(item.name, (pairs, 2, length), item.dtype, item.fill, item.high)
            for item in (tokens, labels)
        )

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of samples."""
        import torch

        tokens = batch["input_ids"]
        return torch.full((), tokens.shape[0], device=tokens.device)

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the next token of each position, [B * sequences, S]."""
        return super().targets(self._rows(batch))

    def head_targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the next token of each position of a batch [B * sequences, S]."""
        return super().targets(batch)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the logits of each answer, [B * sequences, S, vocabulary]."""
        return super().predict(model, self._rows(batch))

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss summed over samples, and the load-balancing loss as often."""
        result = self.preference(self._log_probabilities(prediction, batch), self._lengths(batch)).sum()
        if "auxiliary" in prediction:
            result = result + prediction["auxiliary"].to(result.dtype) * self.weight(batch)
        return result

    @abstractmethod
    def preference(self, log_probabilities: Tensor, lengths: Tensor) -> Tensor:
        """Return the loss of each sample, [B] (of each answer, [B, 1], where they are single).

        Args:
            log_probabilities: Of each answer, summed over its tokens, [B, sequences].
            lengths: Tokens of each answer, [B, sequences].
        """

    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return KL(teacher || student) per token of the answers, times the number of samples."""
        total = super().distance(student, teacher, batch, temperature)
        return total * self.weight(batch) / self._lengths(batch).sum()

    def metrics(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return how many chosen answers are likelier per token, and the load of experts."""
        means = self._log_probabilities(prediction, batch).detach() / self._lengths(batch)
        preferred = (means[:, 0] > means[:, 1]).sum().to(means.dtype)
        return {**super().metrics(prediction, batch), "preferred": preferred}

    def _log_probabilities(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        import torch

        from fsdptool.families.objectives.fused_head import HEAD

        if HEAD in prediction:  # another program's head, which computes the loss of each token
            return -prediction[HEAD].sum(-1).view(-1, self.sequences)
        # ``unbind`` gives each answer's logits without a copy, and one tensor of gradients for all.
        answers = zip(prediction["prediction"].unbind(), self.targets(batch).unbind(), strict=True)
        sums = [-self.cross_entropy(logits, targets, prediction) for logits, targets in answers]
        return torch.stack(sums).view(-1, self.sequences)

    def _lengths(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return tokens of each answer, at least 1, [B, sequences]."""
        return (self.targets(batch) != IGNORED).sum(-1).clamp(min=1).view(-1, self.sequences)

    def _rows(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the answers of a batch one behind the other: chosen, rejected, chosen, ..."""
        return {name: tensor.flatten(0, 1) for name, tensor in batch.items()}


class Orpo(Preference):
    """Odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691, equations 3 to 7).

    The negative log-likelihood per token of the chosen answer, and ``weight`` times -log sigmoid of the log
    odds ratio, where odds are P / (1 - P) and P is the mean likelihood of an answer's tokens (geometric).

    Args:
        odds_weight: Lambda of equation 6.
        chunk, auxiliary: As for ``causal_lm``.
    """

    name = "orpo"

    def __init__(self, odds_weight: float = 0.1, chunk: int = 1024, auxiliary: float | None = None) -> None:
        super().__init__(chunk, auxiliary)
        self.odds_weight = _finite_option(self.name, "odds_weight", odds_weight)

    def preference(self, log_probabilities: Tensor, lengths: Tensor) -> Tensor:
        """Return likelihood and odds ratio of each pair."""
        import torch

        means = log_probabilities / lengths
        # By expm1, which is exact also where P is close to 1; P below 1 keeps the odds finite.
        below = means.clamp(max=-1e-7)
        odds = below - torch.log(-torch.expm1(below))
        ratio = torch.nn.functional.logsigmoid(odds[:, 0] - odds[:, 1])
        return -means[:, 0] - self.odds_weight * ratio


class SimPo(Preference):
    """Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734).

    -log sigmoid of ``beta`` times the difference of the log-likelihoods per token, less ``margin``.

    Args:
        beta: Scale of the reward.
        margin: Gamma: by how much the chosen answer's reward should be greater.
        chunk, auxiliary: As for ``causal_lm``.
    """

    name = "simpo"

    def __init__(
        self, beta: float = 2.0, margin: float = 1.0, chunk: int = 1024, auxiliary: float | None = None
    ) -> None:
        super().__init__(chunk, auxiliary)
        self.beta, self.margin = (
            _finite_option(self.name, "beta", beta),
            _finite_option(self.name, "margin", margin),
        )

    def preference(self, log_probabilities: Tensor, lengths: Tensor) -> Tensor:
        """Return the loss of the difference of rewards."""
        import torch

        rewards = self.beta * log_probabilities / lengths
        return -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1] - self.margin)


class Dpo(Preference):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    The reference model is the teacher of method ``distillation``. Its ``alpha`` of 1 trains this loss alone;
    a smaller one mixes in the negative log-likelihood per token of the chosen answer, which validation
    reports.

    Args:
        beta: How closely the model is kept to the reference.
        chunk, auxiliary: As for ``causal_lm``.
    """

    name = "dpo"
    needs_teacher = True

    def __init__(self, beta: float = 0.1, chunk: int = 1024, auxiliary: float | None = None) -> None:
        super().__init__(chunk, auxiliary)
        self.beta = _finite_option(self.name, "beta", beta)

    def preference(self, log_probabilities: Tensor, lengths: Tensor) -> Tensor:
        """Return the negative log-likelihood per token of the chosen answers."""
        return -log_probabilities[:, 0] / lengths[:, 0]

    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return -log sigmoid of ``beta`` times the gain over the reference, summed over pairs.

        The temperature does not apply.
        """
        import torch

        ours = self._log_probabilities(student, batch)
        gain = self.beta * (ours - self._log_probabilities(teacher, batch).detach())
        return -torch.nn.functional.logsigmoid(gain[:, 0] - gain[:, 1]).sum()


class ApoZeroUnpaired(Preference):
    """Anchored preference optimisation of single answers (D'Oosterlinck et al. 2024, arXiv:2408.06266).

    KTO (Ethayarajh et al. 2024, arXiv:2402.01306, equation 7) with a reference point of zero, as TRL 1.16
    computes it (``trainer/kto_trainer.py``, ``loss_type: apo_zero_unpaired``). Batch: ``input_ids`` and
    ``labels`` [B, S], as one answer of ``dpo``, and ``desirable`` [B], 1 or 0. Losses are summed over
    answers. The reference model and ``alpha`` are as for ``dpo``.

    Args:
        beta: How closely the model is kept to the reference.
        chunk, auxiliary: As for ``causal_lm``.
    """

    name = "apo_zero_unpaired"
    unit = "answers"
    samples = None
    sequences = 1
    needs_teacher = True

    def __init__(self, beta: float = 0.1, chunk: int = 1024, auxiliary: float | None = None) -> None:
        super().__init__(chunk, auxiliary)
        self.beta = _finite_option(self.name, "beta", beta)

    @classmethod
    def batch(cls, config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return tokens and labels of each answer with its prompt, and how it is judged."""
        tokens, labels = CausalLM.batch(config, recipe)[:2]
        return tokens, labels, TensorSpec("desirable", tokens.shape[:1], "int64", "tokens", high=2)

    def preference(self, log_probabilities: Tensor, lengths: Tensor) -> Tensor:
        """Return the negative log-likelihood per token of each answer, [B, 1]."""
        return -log_probabilities / lengths

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the negative log-likelihood per token of the desirable answers, summed."""
        logs = self._log_probabilities(prediction, batch)
        wanted = require(batch, "desirable", self.name)[:, None]
        result = (self.preference(logs, self._lengths(batch)) * wanted).sum()
        if "auxiliary" in prediction:
            result = result + prediction["auxiliary"].to(result.dtype) * self.weight(batch)
        return result

    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return 1 - sigmoid of ``beta`` times the gain of a desirable answer, sigmoid of another's, summed.

        The temperature does not apply.
        """
        import torch

        ours = self._log_probabilities(student, batch)
        gain = self.beta * (ours - self._log_probabilities(teacher, batch).detach())
        sign = 1 - 2 * require(batch, "desirable", self.name)
        return torch.sigmoid(gain * sign[:, None]).sum()

    def metrics(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the load of experts."""
        return CausalLM.metrics(self, prediction, batch)

    def _rows(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in batch.items() if name != "desirable"}


def _finite_option(objective: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"objective {objective}: {name} must be a number of at least 0, got {value!r}")
    return float(value)
