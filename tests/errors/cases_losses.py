"""Invalid losses, advantages, training parameters and microbatches that a check finds."""

from tests.errors.harness import Case

IMPORT = "from stages import CispoLoss, Dynamic, IcePop, Packed, SequenceMask, TruncatedIS\n\n\n"
REF = "(RefLogprobs(policy.frozen(), on=learner),)"


def trained(name: str, parameters: str, code: int = 2, top: str = IMPORT, **lines: str) -> Case:
    """Return a case of Train, which the error must point at."""
    made = {"train": f"Train(policy, on=learner, {parameters})"}
    return Case(name, made | lines, at=("train",), top=top, code=code)


def loss(name: str, text: str, code: int = 2, **lines: str) -> Case:
    """Return a case of the loss of Train."""
    return trained(name, f"loss={text}, lr=1e-3", code, **lines)


def scored_by(name: str, parameters: str) -> Case:
    """Return a case of PrevLogprobs."""
    return Case(name, {"prev": f"PrevLogprobs(policy, on=learner, {parameters})"}, top=IMPORT)


LOSSES = [
    loss("clip_is_one_number", "ClippedLoss(clip=0.2)"),
    loss("clip_of_three_numbers", "ClippedLoss(clip=(0.2, 0.28, 10.0))"),
    loss("clip_down_to_0", "ClippedLoss(clip=(1.0, 0.2))"),
    loss("dual_clip_below_1", "ClippedLoss(dual_clip=0.9)"),
    loss("unknown_ratio", "ClippedLoss(ratio='group')"),
    loss("kl_below_0", "ClippedLoss(kl=-1)"),
    loss("kl_is_a_text", "ClippedLoss(kl='0.1')"),
    loss("kl_clamp_of_0", "ClippedLoss(kl_clamp=0)"),
    loss("unknown_kl_estimator", "ClippedLoss(kl_estimator='kl3')"),
    loss("kl_importance_is_a_number", "ClippedLoss(kl_importance=1)"),
    loss("unknown_aggregation", "ClippedLoss(aggregation='mean')"),
    loss("fixed_length_without_max_tokens", "ClippedLoss(aggregation='fixed_length')"),
    loss("max_tokens_of_0", "ClippedLoss(aggregation='fixed_length', max_tokens=0)"),
    loss("max_tokens_of_another_rollout", "ClippedLoss(aggregation='fixed_length', max_tokens=512)"),
    loss("entropy_below_0", "ClippedLoss(entropy=-0.01)"),
    loss("correction_by_name", "ClippedLoss(correction='tis')"),
    loss("correction_is_a_class", "ClippedLoss(correction=TruncatedIS)"),
    loss("cap_of_0", "ClippedLoss(correction=TruncatedIS(cap=0))"),
    loss("unknown_level", "ClippedLoss(correction=TruncatedIS(level='group'))"),
    loss("icepop_low_above_1", "ClippedLoss(correction=IcePop(low=2.0))"),
    loss("sequence_mask_below_1", "ClippedLoss(correction=SequenceMask(low=0.5, high=0.9))"),
    loss("sequence_mask_without_bounds", "ClippedLoss(correction=SequenceMask())"),
    loss("cispo_clip_is_one_number", "CispoLoss(clip=0.2)"),
    loss("cispo_clip_above_1", "CispoLoss(clip=(1.5, 1.0))"),
    loss("loss_by_name", "'grpo'"),
    loss("loss_is_a_class", "ClippedLoss"),
    loss("loss_parameter_of_another_library", "ClippedLoss(epsilon_high=0.28)"),
    loss("loss_parameter_without_its_name", "ClippedLoss((0.2, 0.28))"),
    trained(
        "loss_without_the_decorator",
        "loss=Mine(scale=2.0), lr=1e-3",
        top="from stages import PolicyLoss\n\n\nclass Mine(PolicyLoss):\n    scale = 1.0\n\n\n",
    ),
    loss("k1_as_a_loss", "ClippedLoss(kl=0.1, kl_estimator='k1')", code=0, extra=REF),
    loss("k2_with_importance", "CispoLoss(kl=0.1, kl_estimator='k2', kl_importance=True)", code=0, extra=REF),
    loss("several_in_one_loss", "ClippedLoss(clip=0.2, kl=-1, aggregation='mean')"),
]
TRAINING = [
    trained("no_learning_rate", "loss=ClippedLoss()"),
    trained("learning_rate_is_a_text", "lr='1e-6'"),
    trained("unknown_learning_rate_schedule", "lr=1e-3, schedule='cosin'"),
    trained("unknown_prev", "lr=1e-3, prev='stage'"),
    trained("unknown_advantage_of_train", "lr=1e-3, advantage='turn'"),
    trained("advantages_of_tokens_that_nothing_writes", "lr=1e-3, advantage='token'"),
    trained("recomputes_what", "lr=1e-3, checkpoint_activations='attention'"),
    trained("recomputes_parts_with_torch", "lr=1e-3, checkpoint_activations='mlp'"),
    trained("logprobs_computed_twice", "lr=1e-3, prev='own'"),
    trained("warmup_below_0", "lr=1e-3, warmup=-1"),
    trained("epochs_of_0", "lr=1e-3, epochs=0"),
    trained("epochs_of_a_half", "lr=1e-3, epochs=1.5"),
    trained("betas_is_one_number", "lr=1e-3, betas=0.9"),
    trained("betas_of_1", "lr=1e-3, betas=(0.9, 1.0)"),
    trained("minibatches_of_0", "lr=1e-3, minibatches=0"),
    trained("train_numbers", "lr=float('nan'), clip_grad=-1, weight_decay=-0.1, eps=0"),
    trained("temperature_of_train_is_another", "lr=1e-3, temperature=0.7"),
    trained("train_runs_on_no_group", "lr=1e-3", train="Train(policy, lr=1e-3)"),
    trained("microbatch_below_0", "lr=1e-3, microbatch=-1"),
    trained("microbatch_is_a_text", "lr=1e-3, microbatch='8'"),
    trained("microbatch_is_true", "lr=1e-3, microbatch=True"),
    trained("microbatch_is_a_class", "lr=1e-3, microbatch=Packed"),
    trained("packed_is_below_the_longest", "lr=1e-3, microbatch=Packed(tokens=3)"),
    trained("packed_without_tokens", "lr=1e-3, microbatch=Packed()"),
    scored_by("dynamic_of_0", "microbatch=Dynamic(0)"),
    scored_by("packed_of_a_text", "microbatch=Packed('8')"),
    scored_by("packed_shared_of_a_text", "microbatch=Packed(4096, shared='no')"),
    scored_by("packed_of_a_fraction", "microbatch=Packed(4096.0)"),
    scored_by("logprobs_at_temperature_0", "temperature=0"),
    Case(
        "rollout_at_another_temperature",
        {"rollout": "Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=3, temperature=0.7)"},
        at=("prev", "train"),
    ),
    Case("reference_that_is_trained", {"extra": "(RefLogprobs(policy, on=learner),)"}),
    Case("advantage_kl_below_0", {"advantage": 'Advantage("rloo", kl=-0.01)'}),
    Case("advantage_kl_without_reference", {"advantage": 'Advantage("rloo", kl=0.01)'}),
    Case(
        "groups_of_one_sample",
        {"rollout": "Rollout(policy, on=sampler, samples_per_prompt=1, max_tokens=3)"},
        at=("advantage",),
        code=0,
    ),
    Case("discount_above_1", {"advantage": 'Advantage("turn", discount=2)'}, at=("advantage", "train")),
    Case("discount_without_turns", {"advantage": 'Advantage("rloo", discount=0.9)'}),
    Case("advantage_is_a_function", {"advantage": "Advantage(exact_match)"}),
    Case("eps_is_a_text", {"advantage": 'Advantage(eps="1e-6")'}),
    Case("max_tokens_is_a_text", {"rollout": 'Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens="3")'}),
    Case(
        "max_tokens_below_1", {"rollout": "Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=0, top_k=-1)"}
    ),
    Case("stop_is_a_text", {"rollout": 'Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=3, stop="</s>")'}),
    Case("samples_per_prompt_is_a_fraction", {"rollout": "Rollout(policy, on=sampler, samples_per_prompt=2.5)"}),
    Case(
        "chat_without_messages",
        {"rollout": "Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=3, chat=True)"},
    ),
]
OWN = """from stages import Correction, PolicyLoss, Scored


@dataclass(frozen=True, kw_only=True)
class Mine(PolicyLoss):{loss}


@dataclass(frozen=True, kw_only=True)
class Weighted(Correction):{correction}


"""
POLICY_GRADIENT = """
    def policy_loss(self, scored, weight_NT):
        return -weight_NT * scored.advantage_N[:, None] * scored.logprobs_NT
"""
EVEN = """
    def weights(self, scored):
        return 0.5 * scored.mask_NT
"""
USED, CORRECTED = "Mine()", "Mine(correction=Weighted())"
NOTHING = "\n    pass\n"


def own(
    name: str, loss: str = POLICY_GRADIENT, correction: str = EVEN, given: str = USED, at: tuple[str, ...] = ()
) -> Case:
    """Return a case of a user's loss or correction; a line that ends in `# here` must be pointed at."""
    made = {"train": f"Train(policy, on=learner, loss={given}, lr=1e-3)"}
    return Case(name, made, at=at, top=OWN.format(loss=loss, correction=correction))


def own_loss(name: str, *body: str, given: str = USED) -> Case:
    """Return a case of the formula of a loss."""
    lines = "".join(f"        {line}\n" for line in body)
    here = "" if "# here" in lines else "  # here"
    return own(name, f"\n    def policy_loss(self, scored, weight_NT):{here}\n{lines}", given=given)


def own_correction(name: str, *body: str) -> Case:
    """Return a case of the formula of a correction."""
    lines = "".join(f"        {line}\n" for line in body)
    here = "" if "# here" in lines else "  # here"
    return own(name, correction=f"\n    def weights(self, scored):{here}\n{lines}", given=CORRECTED)


GAIN = "gain_NT = -weight_NT * scored.advantage_N[:, None] * scored.logprobs_NT"
FORMULAS = [
    own("own_loss_without_a_formula", NOTHING, at=("train",)),
    own("own_correction_without_a_formula", correction=NOTHING, given=CORRECTED, at=("train",)),
    trained("policy_loss_itself", "loss=PolicyLoss(), lr=1e-3", top="from stages import PolicyLoss\n\n\n"),
    own("own_loss_reads_a_name", f"\n    reads = ('difficulty',)\n{POLICY_GRADIENT}", at=("train",)),
    own(
        "own_loss_reads_what_nothing_writes",
        f"\n    reads = (Field('difficulty', dtype='float32'),)\n{POLICY_GRADIENT}",
        at=("train",),
    ),
    own_loss("own_loss_raises", "return -scored.advantages * scored.logprobs_NT  # here"),
    own_loss("own_loss_forgets_an_axis", "return -scored.advantage_N * scored.logprobs_NT  # here"),
    own_loss("own_loss_returns_nothing", GAIN),
    own_loss("own_loss_reads_no_reference", "return scored.logprobs_NT - scored.ref_logprobs_NT  # here"),
    own("own_loss_is_a_class", given="Mine", at=("train",)),
    own_loss("own_loss_is_averaged", GAIN, "return gain_NT.mean()"),
    own_loss("own_loss_per_sample", GAIN, "return gain_NT.sum(1)"),
    own_loss("own_loss_is_detached", GAIN, "return gain_NT.detach()"),
    own_loss("own_loss_of_the_entropy_only", "return 0 * scored.logprobs_NT - scored.entropy_NT"),
    own_loss("own_loss_is_not_a_number", "return (-scored.logprobs_NT - 1).log()"),
    own_loss("own_loss_has_an_infinite_gradient", "return (scored.logprobs_NT - scored.old_logprobs_NT).abs().sqrt()"),
    own_loss("own_loss_looks_into_padding", GAIN, "return gain_NT - gain_NT.mean(1, keepdim=True)"),
    own_loss(
        "own_loss_leaves_out_the_weight", "return -scored.advantage_N[:, None] * scored.logprobs_NT", given=CORRECTED
    ),
    own_loss("own_loss_changes_its_input", "return -scored.advantage_N.mul_(2)[:, None] * scored.logprobs_NT"),
    own_loss("own_loss_changes_the_weight", "return -weight_NT.mul_(2) * scored.logprobs_NT"),
    own_loss("own_loss_with_an_entropy_bonus", GAIN, "return gain_NT - 0.01 * scored.entropy_NT"),
    own_loss("own_loss_mixes_samples", "return -weight_NT * (scored.logprobs_NT - scored.advantage_N.mean())"),
    own_correction("own_correction_mixes_samples", "return scored.logprobs_NT / scored.advantage_N.sum()"),
    own_loss("own_loss_exits", "raise SystemExit(0)  # here"),
    own_loss("own_loss_clipped_is_a_number", GAIN, "return gain_NT, gain_NT"),
    own(
        "own_loss_differs_between_calls",
        "\n    def policy_loss(self, scored, weight_NT, calls=[]):  # here\n        calls.append(1)\n"
        "        return -len(calls) * weight_NT * scored.advantage_N[:, None] * scored.logprobs_NT\n",
    ),
    own(
        "own_loss_of_samples_for_tokens",
        POLICY_GRADIENT.replace("[:, None] * scored.logprobs_NT", "[:, None] * scored.logprobs_NT  # here"),
        given="Mine(), advantage='token'",
    ),
    own("own_loss_is_async", "\n    async def policy_loss(self, scored, weight_NT):  # here\n        return 0\n"),
    own(
        "own_loss_takes_no_weight", "\n    def policy_loss(self, scored):  # here\n        return -scored.logprobs_NT\n"
    ),
    own(
        "own_loss_whose_problems_raise",
        f"{POLICY_GRADIENT}\n    def problems(self, where):\n        return [self.strength]  # here\n",
    ),
    own(
        "own_correction_whose_problems_are_texts",
        correction=f"{EVEN}\n    def problems(self, where):  # here\n        yield 'too strong'\n",
        given=CORRECTED,
    ),
    own_correction("own_correction_raises", "return scored.logprobs  # here"),
    own_correction(
        "own_correction_changes_its_input", "return scored.old_logprobs_NT.sub_(scored.rollout_logprobs_NT).exp()"
    ),
    own_correction("own_correction_is_a_mask", "return scored.mask_NT"),
    own_correction("own_correction_per_sample", "return scored.advantage_N"),
    own_correction("own_correction_looks_into_padding", "return scored.rollout_logprobs_NT.softmax(1)"),
    own_correction("own_correction_is_infinite", "return 1 / (scored.old_logprobs_NT - scored.logprobs_NT.detach())"),
]
CASES = [*LOSSES, *TRAINING, *FORMULAS]
