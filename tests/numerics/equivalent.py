"""Mechanical mutants that no check can catch because they compute the same thing, each with its reason."""

_SHAPES_ONLY = "only the shapes of the two are compared there"
_ALREADY_MASKED = "what it is used for masks again"
_BEYOND = "beyond the clamp, value and gradient are the clamp's"
_TIMES_ZERO = "any finite number does: it is multiplied with an advantage of 0, or not chosen"
_BLOCKS = "the result does not depend on the size of a block, only the memory does"
_NO_CHANCE = "any finite number does: it is multiplied with a probability of 0"
_READ_ONLY = "it is only read as a number; detached, it keeps no graph alive"
_ON_CPU = "on the CPU both ways give the same numbers"

EQUIVALENT: dict[str, dict[str, str]] = {
    "ops.advantage": {
        "_relative: reward_G.std(correction=1) -> reward_G.std()": "1 is torch's default; written for the reader",
        "_unless_equal: 0 -> -1": "equal rewards are equal to the last one too",
    },
    "ops.loss": {
        "clipped_policy_loss: _advantage(logprobs_NT, old_logprobs_NT, advantage, mask_NT, weight_NT) -> "
        "_advantage(old_logprobs_NT, logprobs_NT, advantage, mask_NT, weight_NT)": _SHAPES_ONLY,
        "clipped_policy_loss: log_ratio_NT.detach() -> log_ratio_NT": "it is compared only; detached, it saves memory",
        "clipped_policy_loss: advantage_NT > 0 -> advantage_NT >= 0": "where A is 0 the bound is not used",
        "clipped_policy_loss: torch.where(advantage_NT > 0, ratio_NT > bound_NT, (ratio_NT < bound_NT) & "
        "(advantage_NT < 0)) -> torch.where(ratio_NT > bound_NT, advantage_NT > 0, (ratio_NT < bound_NT) & "
        "(advantage_NT < 0))": "both are the conjunction where it is true, and the rest is the same",
        "clipped_policy_loss: 0.0 -> 1.0": _TIMES_ZERO,
        "clipped_policy_loss: 0.0 -> -1.0": _TIMES_ZERO,
        "cispo_loss: _advantage(logprobs_NT, old_logprobs_NT, advantage, mask_NT, weight_NT) -> "
        "_advantage(old_logprobs_NT, logprobs_NT, advantage, mask_NT, weight_NT)": _SHAPES_ONLY,
        "cispo_loss: blank((logprobs_NT - old_logprobs_NT).detach(), mask_NT) -> "
        "(logprobs_NT - old_logprobs_NT).detach()": "a masked entry has advantage 0, whose weight is set to 0",
        "cispo_loss: 0.0 -> 1.0": _TIMES_ZERO,
        "cispo_loss: 0.0 -> -1.0": _TIMES_ZERO,
    },
    "ops.kl": {
        "kl_estimate: logprobs_NT - ref_logprobs_NT -> ref_logprobs_NT - logprobs_NT": "k2 squares the difference",
        "kl_estimate: torch.maximum(logprobs_NT, ref_logprobs_NT.detach() - math.log(2 * clamp + 4)) -> "
        "torch.maximum(ref_logprobs_NT.detach() - math.log(2 * clamp + 4), logprobs_NT)": "the maximum is the same",
        "kl_estimate: ref_logprobs_NT.detach() -> ref_logprobs_NT": _BEYOND,
        "kl_estimate: 2 -> 3": _BEYOND,
        "kl_estimate: 4 -> 5": _BEYOND,
        "kl_estimate: 4 -> 3": _BEYOND,
    },
    "ops.correction": {
        "_ratio: masked_sum(log_NT, mask_NT, dim=1) -> log_NT.sum(dim=1)": "`_log_ratio` has masked it",
        "_log_ratio: blank(prev_NT.detach() - rollout_NT.detach(), mask_NT) -> "
        "prev_NT.detach() - rollout_NT.detach()": _ALREADY_MASKED,
        "multiplicative_error: prev_logprobs.double() - rollout_logprobs.double() -> "
        "rollout_logprobs.double() - prev_logprobs.double()": "the absolute value is the same",
    },
    "ops.logprobs": {
        "module: 1 -> 2": _BLOCKS,
        "module: 1 -> 0": _BLOCKS,
        "module: 25 -> 26": _BLOCKS,
        "module: 25 -> 24": _BLOCKS,
        "_entropy_rows: 0.0 -> 1.0": _NO_CHANCE,
        "_entropy_rows: 0.0 -> -1.0": _NO_CHANCE,
        "_Entropy.forward: 1 -> 2 #3": "one part joined is that part",
        "_Entropy.forward: 1 -> 0 #3": "one part joined is that part",
        "_Entropy.forward: 0 -> -1": "of one part, the first is the last",
        "_Entropy.backward: 0.0 -> 1.0": _NO_CHANCE,
        "_Entropy.backward: 0.0 -> -1.0": _NO_CHANCE,
        "_blocks: 1 -> 2 #2": "a vocabulary has two tokens or more",
        "_blocks: 1 -> 0 #2": "a vocabulary has two tokens or more",
        "_blocks: 1 -> 2 #4": "a second block of no row adds nothing",
    },
    "ops.masks": {
        "length_mask: torch.arange(tokens, device=lengths.device) -> torch.arange(tokens)": _ON_CPU,
    },
    "stages.backends.objective": {
        "objective: 0 -> -1": "the first of one is the last",
        "on_device: kl_NT.detach() -> kl_NT": _READ_ONLY,
        "on_device: scored.entropy_NT.detach() -> scored.entropy_NT": _READ_ONLY,
        "on_device: loss.log_ratio(scored).detach() -> loss.log_ratio(scored)": _READ_ONLY,
        "on_device: value.detach() -> value": _READ_ONLY,
        "on_device: log_ratio_NT > 0 -> log_ratio_NT >= 0": "a token whose ratio is 1 is not clipped, but for its "
        "sequence's ratio, and then it is neither high nor low",
        "read: numbers[0].device.type != 'cpu' -> numbers[0].device.type == 'cpu'": _ON_CPU,
        "read: 0 -> 1": "all numbers are on one device",
        "read: 0 -> -1": "all numbers are on one device",
        "read: 'cpu' -> 'cpu_'": _ON_CPU,
    },
}
