"""State alignment: the predicted states regress the latents of the next observation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.actions import Action
from worldmodel.batch import map_tensors, to_device
from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.models import text
from worldmodel.models.code import divergence, straight_through
from worldmodel.models.conditioning import Codes, Prediction
from worldmodel.models.layers.norm import upcast
from worldmodel.models.outcome import OutcomeHead
from worldmodel.models.sequence import embed_rounds
from worldmodel.models.state import State
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.train.episodes import encode_observations, encode_rounds
from worldmodel.train.objectives.alignment import AlignmentObjective, word_loss
from worldmodel.train.objectives.base import (
    Counts,
    Losses,
    Objective,
    Rounds,
    SampleRng,
    StageBatch,
    TextPrompt,
    add_noise,
    drop_actions,
    label,
)
from worldmodel.train.objectives.codec import pixel_error
from worldmodel.train.objectives.language import LanguageObjective, text_loss
from worldmodel.train.objectives.rollout import RolloutWindow, SelfRollout


def spare_round(model: WorldModel) -> Float[Tensor, "_ d"]:
    """Embed a round of a blank observation without an action, so that sharded modules are called."""
    blank = model.blank_observation(1)
    context = blank.latents[:, None].detach()  # as what is observed: gradients are reduced in one order
    frames = None if blank.frames is None else blank.frames[:, None]
    (rows,), _ = embed_rounds(model, context, model.action.of_rounds([Action()]), frames)
    return rows


class StateObjective(Objective):
    """State alignment, mixed with text tasks that keep the backbone's language ability.

    The states regress the next observation's latents without running the generator. Where the data are of a
    simulator that gives labels of cells, linear probes also locate the objects that the action names and tell
    the words for what is new on a cell (a squared error hardly distinguishes two shapes of one colour and
    size, and is content with their mean), and vision alignment continues. Recordings have no such labels.
    Tasks without actions are scored by the log-likelihood of their answers.

    With our own codec, `loss_weights: {forecast_pixel: 0.3}` also decodes one frame of every forecast and
    compares pixels, because an error in latents is not equally visible in all directions. It is for worlds
    that show the forecast: the others have that loss behind the generator (`pixel`).
    """

    previews_rounds = True
    context_noise = 0.15
    weights: Mapping[str, float] = {
        "changed": 0.5,
        "unchanged": 1.0,
        "nll": 0.5,
        "named": 0.2,
        "reward": 0.2,
        "end": 0.2,
        "forecast_pixel": 0.0,
        "prior": 0.1,
        "rate": 0.01,
    }

    def __init__(
        self,
        model: WorldModel,
        free_nats: float = 0.0,
        label_steps: int = 0,
        observed_rounds: int = 0,
        through_time: float = 1.0,
    ) -> None:
        """Make the heads that are trained with the model.

        Args:
            model: The model.
            free_nats: Nats per round that a code may use without a loss; more than 0 at first keeps events
                that change few cells from being left out of it.
            label_steps: Steps in which the losses of the simulator's labels decrease to zero, linearly; 0
                keeps them.
            observed_rounds: Rounds at the beginning of a self-rollout that lead to what was recorded, as if a
                session had observed them. Where one frame does not show how things move, a self-rollout from
                it teaches the mean of all motions.
            through_time: Factor on the gradients that reach a round of a self-rollout from the one after it;
                0 is none. Below 1 they do not grow over the rounds, which destroys a world that changes
                abruptly.
        """
        super().__init__(model)
        if not 0 <= free_nats < math.inf:
            raise ConfigError(f"A stage has free_nats {free_nats}; use 0 or more.")
        if label_steps < 0:
            raise ConfigError(f"A stage has label_steps {label_steps}; use 0 or more.")
        if observed_rounds < 0:
            raise ConfigError(f"A stage has observed_rounds {observed_rounds}; use 0 or more.")
        if not 0 <= through_time <= 1:
            raise ConfigError(f"A stage has through_time {through_time}; use 0 to 1.")
        self.free_nats, self.label_steps, self.observed_rounds = free_nats, label_steps, observed_rounds
        self.through_time = through_time
        self.forecasts = model.config.has_state
        # Labels are of cells, and so are queries, unless there are any number of them (`queries`).
        self.placed = self.forecasts and (model.config.vision.sees_latents or not model.config.queries)
        adapter = model.config.condition_adapter
        self.residual = adapter.kind == "grid" and adapter.forecast == "residual"
        self.named = nn.Linear(model.backbone.width, 1)
        self.alignment = AlignmentObjective(model)
        words = self.alignment.words
        self.next_words = nn.ModuleDict(
            {kind: nn.Linear(model.backbone.width, len(words[kind])) for kind in words}
        )
        next_weights = {f"next_{kind}": 0.5 / len(self.next_words) for kind in self.next_words}
        self.weights = {**type(self).weights, **self.alignment.kind_weights(0.5), **next_weights}
        self.language = LanguageObjective(model)
        self.check(model)

    def check(self, model: WorldModel) -> None:
        """Check that the model can be trained by this objective.

        Raises:
            ConfigError: it has no state.
        """
        if not self.forecasts:
            raise ConfigError(
                "The objective state trains the state head, and this model has none; leave model.state out "
                "of the config, or use the objective prompt, generator or joint."
            )

    def prepare(self, model: WorldModel, batch: Batch, rng: SampleRng) -> StageBatch:
        if batch.task == "document":
            return self.language.prepare(model, batch, rng)
        if batch.episodes[0].prompt is not None:
            return self.prepare_text(model, batch, rng)
        batch = drop_actions(batch, rng, model.config.action.dropout)
        rounds = encode_rounds(model, batch)
        counts: Counts = rounds.counts() if self.forecasts else {}
        if model.config.has_code:
            number = rounds.scored.double().sum()
            counts |= {"changed": number, "prior": number, "rate": number, "nats": number}
        if self.weights.get("forecast_pixel") and self.forecasts:
            if model.codec.causal:
                raise ConfigError(
                    "loss_weights.forecast_pixel decodes single latent frames, which a causal codec of "
                    "diffusers does not do; leave it out."
                )
            counts |= {"forecast_pixel": rounds.scored.double().sum()}
        if model.config.outcomes:
            known = sum(len(episode.outcomes) for episode in batch.episodes)
            counts |= {"reward": float(known), "end": float(known)}
        if self.placed and batch.task == "rounds":
            truth, known = named_cells(model, batch)
            counts["named"] = float(truth[known].numel())
            for kind, words in self.new_words(model, batch).items():
                counts[f"next_{kind}"] = float(words.any(dim=-1).sum())
            if model.config.vision.sees_latents:
                counts |= self.alignment.counts(model, batch)
        tokens = rounds.context.shape[0] * rounds.context.shape[1] * model.round_tokens
        return StageBatch(batch, rng, counts, rounds, tokens)

    def prepare_text(self, model: WorldModel, batch: Batch, rng: SampleRng) -> StageBatch:
        """Encode observations with their prompts and count the tokens of the answers."""
        observations = encode_observations(model, batch)
        answers = [episode.answer or "" for episode in batch.episodes]
        answer_tokens = sum(len(model.backbone.token_ids(answer)) + 1 for answer in answers)
        prompt = TextPrompt(observations, [episode.prompt for episode in batch.episodes], answers)
        if batch.episodes[0].actions:
            rounds = encode_rounds(model, batch)
            prompt = replace(prompt, before=rounds.context, frames=rounds.frames)
        per_latent = model.vision.round_tokens // model.config.unseen_latents
        vision_tokens = sum(
            model.vision.round_tokens if model.vision.needs_frames else each.shape[0] * per_latent
            for each in observations
        )
        earlier = sum(len(episode.actions) for episode in batch.episodes) * model.round_tokens
        tokens = answer_tokens + vision_tokens + earlier
        return StageBatch(batch, rng, {"nll": float(answer_tokens)}, prompt, tokens)

    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        if inputs.batch.task == "document":
            return self.language(model, inputs)
        if isinstance(inputs.content, TextPrompt):
            return self.text_losses(model, inputs)
        codes, log_posterior = self.codes(model, inputs)
        prediction = self.predict(model, inputs, codes)
        return self.state_losses(model, inputs, prediction, log_posterior)

    def text_losses(self, model: WorldModel, inputs: StageBatch) -> Losses:
        """Score the answers to prompts about noisy observations and, if there are any, earlier rounds."""
        prompt, rng = inputs.content, inputs.rng
        strength = rng.uniform()
        longest = max(each.shape[0] for each in prompt.observations)
        noise = rng.normal(longest, *prompt.observations[0].latents.shape[2:])
        observations = [
            Observation(
                add_noise(each.latents, self.context_noise, strength[row], noise[row, None, : each.shape[0]]),
                each.frames,
            )
            for row, each in enumerate(prompt.observations)
        ]
        # Texts are of any source, so another process may have earlier rounds where this one has none.
        (with_earlier,) = model.agreement.most(int(prompt.before is not None))
        if prompt.before is not None:
            done = [
                action
                for episode in inputs.batch.episodes
                for action in model.action.of_rounds(list(episode.actions))
            ]
            earlier, _ = embed_rounds(model, self.noisy_context(prompt.before, rng), done, prompt.frames)
            observations = [
                replace(seen, before=(rows,)) for seen, rows in zip(observations, earlier, strict=True)
            ]
        elif with_earlier:
            observations[0] = replace(observations[0], before=(spare_round(model)[:0],))
        rows = text.sequences(model, observations, prompt.prompts, prompt.answers)
        return {"nll": text_loss(model, [row for row, _ in rows], [labels for _, labels in rows])}

    def codes(self, model: WorldModel, inputs: StageBatch) -> tuple[Codes | None, Tensor | None]:
        """Draw the code of every round from the posterior; also return its log-probabilities.

        The posterior sees the true observations and no hidden states, so the codes of all rounds are known
        before the one pass of the backbone that reads them.
        """
        if model.state is None or model.state.code is None:
            return None, None
        context, target = inputs.content.context, inputs.content.target
        log_posterior = model.state.posterior(context.flatten(0, 1), target.flatten(0, 1))
        draws = inputs.rng.uniform(target.shape[1], model.state.code.length).flatten(0, 1)
        code = straight_through(log_posterior, draws)
        return Codes(code.unflatten(0, target.shape[:2])), log_posterior

    def predict(self, model: WorldModel, inputs: StageBatch, codes: Codes | None = None) -> Prediction:
        """Predict every round from what it observes; without codes, the future that is most likely.

        Like a session, a round sees no more than `context_rounds` rounds, however long its episode is.
        """
        rounds, batch = inputs.content, inputs.batch
        actions = [list(episode.actions) for episode in batch.episodes]
        if batch.self_rollout and batch.task != "imagine" and self.is_differentiable(model, rounds):
            context = self.noisy_context(rounds.context, inputs.rng)
            return self.self_rollout(model, context, rounds, actions, inputs.rng, codes).prediction()
        context, frames = self.observed(model, inputs, codes)
        return predict_windows(model, context, actions, frames, codes)

    def observed(
        self, model: WorldModel, inputs: StageBatch, codes: Codes | None = None
    ) -> tuple[Float[Tensor, "b r s c h w"], Tensor | None]:
        """Return context and frames of rounds: noisy true ones (teacher forcing), or a self-rollout's."""
        rounds, batch = inputs.content, inputs.batch
        if batch.task == "imagine":
            return model.blank_observation(len(batch.episodes)).latents[:, None], rounds.frames
        context = self.noisy_context(rounds.context, inputs.rng)
        if not batch.self_rollout:
            return context, rounds.frames
        actions = [list(episode.actions) for episode in batch.episodes]
        with torch.no_grad():
            played = self.self_rollout(model, context, rounds, actions, inputs.rng, codes)
        return played.context, played.frames

    def noisy_context(
        self, context: Float[Tensor, "b r s c h w"], rng: SampleRng
    ) -> Float[Tensor, "b r s c h w"]:
        """Add noise to what rounds observe.

        The frames of a round share it: an error of a prediction hardly differs from the next one's, and how
        things move would be lost in noise of their own.
        """
        shape = context.shape
        strength, noise = rng.uniform(shape[1]).flatten(), rng.normal(shape[1], 1, *shape[3:])
        return add_noise(context.flatten(0, 1), self.context_noise, strength, noise.flatten(0, 1)).view(shape)

    def is_differentiable(self, model: WorldModel, rounds: Rounds) -> bool:
        """Return whether errors of a round of a self-rollout reach the rounds that led to it.

        Not through what is decoded to pixels on the way, for a causal codec or a vision encoder.
        """
        return torch.is_grad_enabled() and not model.codec.causal and rounds.frames is None

    def self_rollout(
        self,
        model: WorldModel,
        context: Float[Tensor, "b r s c h w"],
        rounds: Rounds,
        actions: list[list[Action]],
        rng: SampleRng,
        codes: Codes | None,
    ) -> SelfRollout:
        """Play rounds that observe the model's own predictions, while targets stay true.

        So the model learns to correct its drift, and where gradients flow, also to make predictions from
        which the later ones are right: what an action does to the next frame is often less than a pixel, and
        only adds up in the frames after it. The first rounds (`observed_rounds`), and what follows a round
        that is not scored, see what was observed. Codes are those of what really happened, or targets would
        be of another future.
        """
        differentiable = self.is_differentiable(model, rounds)
        observed, frames = self.observed_rounds + 1, rounds.frames
        count = context.shape[1]
        seen = list(context[:, :observed].unbind(dim=1))
        pixels = [] if frames is None else list(frames[:, :observed].unbind(dim=1))
        hidden_states, states = [], []
        window = RolloutWindow(model, actions)
        (most,) = model.agreement.most(count)
        for index in range(count):
            last, done = seen[index], [episode[index] for episode in actions]
            if index + 1 == count and not differentiable:
                break  # nothing follows, and the prediction is made of all rounds in one pass
            known = codes and codes.rounds(index, index + 1)
            history = known and model.state and model.state.history(known.following()[:, 0])
            hidden = window.play(index, last, pixels[index] if pixels else None, history)
            predicted = observed <= index + 1 < count
            if not predicted and not differentiable:
                continue
            state = model.read_state(hidden, last, done, code=known and known.code[:, 0])
            hidden_states.append(hidden)
            states.append(state)
            if not predicted:
                continue
            following, shown = self.next_round(model, state, last, done, rng, bool(pixels))
            following = following.detach().lerp(following, self.through_time)
            played = rounds.scored[:, index, None, None, None, None]
            seen.append(following.where(played, context[:, index + 1]))
            if shown is not None and frames is not None:
                pixels.append(shown.where(played, frames[:, index + 1]))
        for index in range(count, most):  # other processes have more rounds
            first = context[:1, 0]
            hidden = RolloutWindow(model, actions[:1]).play(
                0, first, None if frames is None else frames[:1, 0]
            )
            if differentiable:
                state = model.read_state(hidden, first, actions[0][:1], code=codes and codes.code[:1, 0])
                assert state.forecast is not None
                # Its backward pass gathers weights, too.
                hidden_states[-1] = hidden_states[-1] + 0 * (hidden.sum() + state.forecast.sum())
            elif index >= observed:
                state = model.read_state(hidden, first, actions[0][:1], code=codes and codes.code[:1, 0])
                other = SampleRng([(0,)], rng.device, rng.dtype)
                self.next_round(model, state, first, actions[0][:1], other, frames is not None)
        return SelfRollout(
            model,
            actions,
            torch.stack(seen, dim=1),
            torch.stack(pixels, dim=1) if pixels else None,
            hidden_states,
            states,
        )

    def next_round(
        self,
        model: WorldModel,
        state: State,
        last: Float[Tensor, "b s c h w"],
        actions: list[Action],
        rng: SampleRng,
        needs_frames: bool,
    ) -> tuple[Float[Tensor, "b s c h w"], Tensor | None]:
        """Return context and frames of the round that follows `last` by a predicted state."""
        latents = self.next_latents(model, state, last, actions, rng)
        clip = model.decode(latents, last) if model.codec.causal or needs_frames else None
        following = model.codec.context(latents, clip, model.config.context_latents, last)
        return following, None if clip is None else model.vision.select_frames(clip)

    def next_latents(
        self, model: WorldModel, state: State, context: Tensor, actions: list[Action], rng: SampleRng
    ) -> Float[Tensor, "b t c h w"]:
        """Return the latents with which a self-rollout continues."""
        assert state.forecast is not None, "checked at the start"
        return state.forecast

    def state_losses(
        self,
        model: WorldModel,
        inputs: StageBatch,
        prediction: Prediction,
        log_posterior: Float[Tensor, "b v k"] | None,
    ) -> Losses:
        """Compare the forecast with the target, the code's distributions, and probes with labels."""
        rounds = inputs.content
        batch = inputs.batch
        forecast = prediction.state.forecast
        if forecast is None or model.state is None:
            return {}
        target = model.state.target(rounds.target.flatten(0, 1)).view_as(rounds.target)
        forecast = forecast.view_as(target)
        losses = rounds.errors(forecast, target)
        if log_posterior is not None:
            losses["changed"] = rounds.mean_changed(forecast, target)
            losses |= self.code_losses(prediction.state, log_posterior, rounds)
        if self.weights.get("forecast_pixel"):
            error = pixel_error(model, target.flatten(0, 1), forecast.flatten(0, 1), inputs.rng)
            losses["forecast_pixel"] = (error * rounds.scored.flatten()).sum()
        if model.state.outcome is not None:
            losses |= outcome_losses(model.state.outcome, prediction.hidden, batch)
        weight = self.label_weight(batch.step)
        if self.placed and batch.task == "rounds" and weight:
            labels: Losses = {}
            truth, known = named_cells(model, batch)
            rows = to_device(known.nonzero().flatten(), model.device)
            logits = upcast(self.named(prediction.hidden[rows, 0])).squeeze(-1)
            truth = to_device(truth[known].flatten(1), model.device).to(logits)
            labels["named"] = F.binary_cross_entropy_with_logits(
                logits,
                truth,
                pos_weight=torch.full((), 3.0, dtype=logits.dtype, device=logits.device),
                reduction="sum",
            )
            for kind, truth in self.new_words(model, batch).items():
                known = truth.any(dim=-1)
                rows, queries = to_device(known.nonzero(), model.device).unbind(dim=1)
                logits = self.next_words[kind](prediction.hidden[rows, 0, queries])
                labels[f"next_{kind}"] = word_loss(upcast(logits), to_device(truth[known], model.device))
            if model.config.vision.sees_latents:
                labels |= self.alignment.alignment(model, rounds.context[:, 0, -1:], batch)
            # Shares of right answers, which have no weight, are only reported.
            losses |= {name: weight * x if name in self.weights else x for name, x in labels.items()}
        return losses

    def label_weight(self, step: int) -> float:
        """Return the factor on the losses of the simulator's labels in a step of the stage."""
        return 1.0 if not self.label_steps else max(0.0, 1 - step / self.label_steps)

    def code_losses(self, state: State, log_posterior: Float[Tensor, "b v k"], rounds: Rounds) -> Losses:
        """Let the prior learn the posterior, and the posterior keep to what the prior can foresee.

        Both are the same divergence with the gradient of one side, since the prior has to learn faster than
        the posterior gives in (Hafner et al. 2021, arXiv:2010.02193, "KL balancing"). Free nats are the
        posterior's alone: the prior always learns.
        """
        assert state.log_prior is not None, "the code was drawn from the posterior"
        scored = rounds.scored.flatten()
        prior = divergence(log_posterior.detach(), state.log_prior)
        rate = divergence(log_posterior, state.log_prior.detach()).clamp(min=self.free_nats)
        return {
            "prior": (prior * scored).sum(),
            "rate": (rate * scored).sum(),
            "nats": (prior.detach() * scored).sum(),
        }

    def new_words(self, model: WorldModel, batch: Batch) -> dict[str, Tensor]:
        """Return for each kind which words are new on the cells of each query, `[b, queries, words]`."""
        return self.alignment.truths(model, batch, "next_words", model.config.query_merge)

    def preview(self, model: WorldModel, inputs: StageBatch) -> tuple[Tensor, Tensor] | None:
        """Return the last round: the true video, and the one that the model predicts."""
        if not isinstance(inputs.content, Rounds):
            return None
        rounds = inputs.content
        prediction = self.predict(model, inputs)
        latents = self.predicted_latents(model, prediction, inputs)[:, -1]
        context = rounds.context[:, -1]
        return model.decode(rounds.target[:, -1], context), model.decode(latents, context)

    def predicted_latents(
        self, model: WorldModel, prediction: Prediction, inputs: StageBatch
    ) -> Float[Tensor, "b r t c h w"]:
        """Return the latents that are shown to a user."""
        assert prediction.state.forecast is not None, "checked at the start"
        return prediction.state.forecast.unflatten(0, prediction.context.shape[:2])


def predict_windows(
    model: WorldModel,
    context: Float[Tensor, "b r s c h w"],
    actions: Sequence[Sequence[Action]],
    frames: Float[Tensor, "b r f 3 H W"] | None,
    codes: Codes | None = None,
) -> Prediction:
    """Predict every round, in windows of `context_rounds` rounds: a session remembers no more.

    The last window of an episode begins earlier where fewer rounds are left.
    """
    (batch, rounds), size = context.shape[:2], model.config.context_rounds
    if rounds <= size:
        return model(context, actions, frames, codes)
    windows = [range(first, first + size) for first in range(0, rounds - size, size)]
    windows.append(range(rounds - size, rounds))
    numbers = [number for window in windows for number in window]
    index = to_device(torch.tensor(numbers), model.device)
    kept = to_device(torch.tensor([numbers.index(number) for number in range(rounds)]), model.device)

    def folded(x: Tensor) -> Tensor:
        return x.index_select(1, index).unflatten(1, (len(windows), size)).flatten(0, 1)

    def unfolded(x: Tensor) -> Tensor:
        return x.unflatten(0, (batch, len(numbers))).index_select(1, kept).flatten(0, 1)

    prediction = model(
        folded(context),
        [[episode[number] for number in window] for episode in actions for window in windows],
        None if frames is None else folded(frames),
        codes and Codes(folded(codes.code), folded(codes.following())[:, 0]),
    )
    return Prediction(
        unfolded(prediction.hidden.flatten(0, 1)).unflatten(0, (batch, rounds)),
        context,
        map_tensors(unfolded, prediction.state),
        map_tensors(unfolded, prediction.condition),
    )


def named_cells(model: WorldModel, batch: Batch) -> tuple[Float[Tensor, "b h w"], Tensor]:
    """Return the queries on whose cells an object is that the action names, and which rows know of any."""
    truth, known = label(batch, "named", model.config.codec.grid)
    return F.max_pool2d(truth, model.config.query_merge), known


def outcome_losses(head: OutcomeHead, states: Float[Tensor, "b r n d"], batch: Batch) -> Losses:
    """Compare rewards and ends with recorded ones, where episodes state them."""
    truth = torch.zeros(*states.shape[:2], 3)
    for row, episode in enumerate(batch.episodes):
        for column, outcome in enumerate(episode.outcomes):
            truth[row, column] = torch.tensor([outcome.reward, outcome.ended, 1.0])
    reward, ended, known = to_device(truth.flatten(0, 1), states.device).unbind(dim=1)
    bins, ends = head(states.flatten(0, 1))
    surprise = F.cross_entropy(bins, head.target(reward).to(bins), reduction="none")
    end = F.binary_cross_entropy_with_logits(ends, ended.to(ends), reduction="none")
    return {"reward": (surprise * known).sum(), "end": (end * known).sum()}
