"""Recurrences by name: exponential_moving_average, discounted_returns and advantages. Each is the body of a `scan`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxkern._core import validate
from jaxkern._core.jaxprs import computing, held
from jaxkern._definitions.scan import along_split_steps, loop
from jaxkern.scan import linear_recurrence


def exponential_moving_average(
    x: ArrayLike, decay: ArrayLike, *, axis: int = 0, initial: ArrayLike | None = None, reverse: bool = False
) -> jax.Array:
    """y[t] = decay y[t - 1] + (1 - decay) x[t] along `axis`, or without `initial` the mean of x[t - k] weighted by decay^k.

    Args:
        x: array of real dtype.
        decay: between 0 and 1: a number, or an array that broadcasts against `x`, such as one number for each feature.
        axis: the axis of the steps in their common shape.
        initial: None: the mean of the elements so far, element t - k weighted by decay^k. So there is no bias towards a first
            value: it is `optax.ema` with `debias` and `ewm(adjust=True).mean()` of pandas. Otherwise y before the first step,
            which broadcasts to the common shape without the axis. `initial=0` is `optax.ema` with `debias=False`, and the
            first element of `x` is `adjust=False` of pandas.
        reverse: averages from the last element to the first.

    Returns:
        Array of the common shape and floating-point dtype. 16-bit numbers are averaged in float32 and rounded once. NaN
        stays in all later averages.

    Raises:
        TypeError: an operand is not an array of real dtype, `axis` not an int, or `reverse` not a bool.
        ValueError: shapes do not broadcast, or `axis` is out of bounds.

    Derivatives: forward and reverse mode, of any order, by `x`, `decay` and `initial`. The gradient is a recurrence in the
    other direction.

    Cost: a `scan`, which is one kernel on a GPU: for n elements of e bytes, it moves 2 n e bytes (and the weights, if
    `initial` is None). An operand that is the same in all steps is read once.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.exponential_moving_average(jnp.array([1.0, 2.5, 6.0]), 0.5).tolist()
    [1.0, 2.0, 4.285714149475098]
    >>> jaxkern.exponential_moving_average(jnp.array([1.0, 2.0, 6.0]), 0.5, initial=0).tolist()
    [0.5, 1.25, 3.625]

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, section 3, for the correction of the bias.
    """
    name = "exponential_moving_average"
    reverse = validate.flag(name, "reverse", reverse)
    steps = _Steps(name, {"x": x, "decay": decay}, axis)
    first = steps.carry("initial", initial)
    if initial is not None:

        def step(y, x, decay):
            y = decay * y + (1 - decay) * x
            return y, y.astype(steps.stored)

        return steps.scan(step, first, reverse)
    ones = jnp.ones([n if a == steps.axis else 1 for a, n in enumerate(steps.shape)], steps.wide)
    decays = steps.operands[1].astype(steps.wide)
    weight = linear_recurrence(decays, ones, axis=steps.axis, reverse=reverse)  # of all elements so far
    narrow = steps.stored.itemsize < 4  # a division would take longer than the bytes, and one rounding hides another
    steps.operands.append(1 / weight if narrow else weight)

    def mean(total, x, decay, weight):
        total = decay * total + x
        return total, (total * weight if narrow else total / weight).astype(steps.stored)

    return steps.scan(mean, first, reverse)


def discounted_returns(
    rewards: ArrayLike,
    discounts: ArrayLike,
    *,
    bootstrap: ArrayLike | None = None,
    done: ArrayLike | None = None,
    axis: int = 0,
) -> jax.Array:
    """G[t] = rewards[t] + discounts[t] G[t + 1]: discounted sums of the rewards from each step on.

    Args:
        rewards: array of real dtype: what is received for the action of each step.
        discounts: a number, or an array that broadcasts against `rewards`: the discount of what comes after each step.
        bootstrap: G after the last step, such as a critic's value; it broadcasts to the common shape without the axis. 0 by
            default.
        done: boolean array that broadcasts to the common shape: whether the episode ends with the step. Nothing that comes
            after it counts, as for a discount of 0.
        axis: the axis of the steps in the common shape of all operands.

    Returns:
        G, of the common shape and floating-point dtype. 16-bit numbers are summed in float32 and rounded once.

    Raises:
        TypeError: an operand is not an array of real dtype, `done` is not boolean, or `axis` not an int.
        ValueError: shapes do not broadcast, or `axis` is out of bounds.

    Derivatives: forward and reverse mode, of any order, by all operands but `done`.

    Cost: a `scan`, which is one kernel on a GPU: rewards, and discounts and `done` if they differ from step to step, are
    read once, and G is written once.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.discounted_returns(jnp.ones(4), 0.5, bootstrap=8.0, done=jnp.array([False, True, False, False])).tolist()
    [1.5, 1.0, 3.5, 5.0]

    Source: Sutton and Barto, "Reinforcement Learning", 2018, section 3.3. Indices count as in `rlax.discounted_returns`.
    """
    name = "discounted_returns"
    steps = _Steps(name, {"rewards": rewards, "discounts": discounts}, axis, done=done)

    def step(g, reward, discount, done):
        g = reward + jnp.where(done, 0, discount * g)
        return g, g.astype(steps.stored)

    return steps.scan(step, steps.carry("bootstrap", bootstrap), reverse=True)


def advantages(
    rewards: ArrayLike,
    values: ArrayLike,
    discounts: ArrayLike,
    lambda_: ArrayLike,
    *,
    bootstrap: ArrayLike | None = None,
    done: ArrayLike | None = None,
    axis: int = 0,
) -> jax.Array:
    """A[t] = delta[t] + discounts[t] lambda_[t] A[t + 1]: generalised advantage estimates (GAE).

    Here delta[t] = rewards[t] + discounts[t] values[t + 1] - values[t], and A = 0 after the last step.

    Args:
        rewards: array of real dtype: what is received for the action of each step.
        values: estimates of a critic for the states in which the actions are taken. Without `bootstrap` they have one more step
            than the rewards, as for `rlax.truncated_generalized_advantage_estimation`.
        discounts, lambda_: numbers, or arrays that broadcast against `rewards`.
        bootstrap: the value of the state after the last step; it broadcasts to the common shape without the axis. `values`
            has as many steps as `rewards` then.
        done: boolean array that broadcasts to the common shape: whether the episode ends with the step, as for a discount of 0.
        axis: the axis of the steps in the common shape of all operands.

    Returns:
        A, of the common shape and floating-point dtype; A + values are the returns that a critic learns. 16-bit numbers are
        summed in float32 and rounded once.

    Raises:
        TypeError: an operand is not an array of real dtype, `done` is not boolean, or `axis` not an int.
        ValueError: shapes do not broadcast, `values` has another number of steps, or `axis` is out of bounds.

    Derivatives: forward and reverse mode, of any order, by all operands but `done`.

    Cost: a `scan`, which is one kernel on a GPU: rewards, values, and the other operands if they differ from step to step,
    are read once, and A is written once.

    >>> import jax.numpy as jnp, jaxkern
    >>> rewards, values = jnp.ones(3), jnp.zeros(4)
    >>> jaxkern.advantages(rewards, values, 0.5, 1.0).tolist()
    [1.75, 1.5, 1.0]
    >>> jaxkern.advantages(rewards, values[:-1], 0.5, 1.0, bootstrap=2.0, done=jnp.array([True, False, False])).tolist()
    [1.0, 2.0, 2.0]

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", ICLR 2016.
    """
    name = "advantages"
    if bootstrap is None:
        values, bootstrap = _without_last(name, rewards, values, axis)
    operands = {"rewards": rewards, "values": values, "discounts": discounts, "lambda_": lambda_}
    steps = _Steps(name, operands, axis, done=done)

    def step(carry, reward, value, discount, decay, done):
        advantage, after = carry
        discount = jnp.where(done, 0, discount)
        advantage = reward + discount * after - value + discount * decay * advantage
        return (advantage, value), advantage.astype(steps.stored)

    return steps.scan(step, (steps.carry("advantage"), steps.carry("bootstrap", bootstrap)), reverse=True)


def _without_last(name, rewards, values, axis):
    """(values without their last step, the last step)."""
    for argument, x in (("rewards", rewards), ("values", values)):
        validate.check_array(name, argument, "an array of real dtype", x)
    rewards, values = jnp.asarray(rewards), jnp.asarray(values)
    along = _axis(name, axis, rewards.shape)
    if values.ndim != rewards.ndim or values.shape[along] != rewards.shape[along] + 1:
        raise ValueError(
            f"jaxkern.{name}: values must have one step more than rewards of shape {rewards.shape} along axis {axis}, or bootstrap "
            f"must be given; got shape {values.shape}"
        )
    steps, last = jnp.split(values, [values.shape[along] - 1], along)
    return steps, jnp.squeeze(last, along)


def _axis(name, axis, shape) -> int:
    along = validate.static_axis(name, axis)
    if not isinstance(along, int):
        raise TypeError(f"jaxkern.{name}: axis must be an int, got {validate.shown(axis)}")
    if not -len(shape) <= along < len(shape):
        raise ValueError(f"jaxkern.{name}: axis {axis} is out of bounds for shape {shape}")
    return along % len(shape)


class _Steps:
    """Operands of a recurrence, of one rank. Bodies get real ones in the type in which they are computed.

    shape: the common shape; axis: the axis of the steps in it, not negative. dtype: the type of the result;
    stored: the type that bodies return; wide: the type of the carries.
    """

    def __init__(self, name, given, axis, **masks):
        for argument, x in given.items():
            validate.check_array(name, argument, "an array of real dtype", x)
            validate.real(name, argument, jnp.asarray(x))
        dtype = jnp.result_type(*given.values())
        self.name = name
        self.dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(dtype, 1.0)
        self.stored = held(self.dtype)
        self.wide = computing(self.stored)
        number = lambda x: jnp.asarray(x, held(x.dtype) if hasattr(x, "dtype") else self.wide)
        operands = {argument: number(x) for argument, x in given.items()}
        for argument, mask in masks.items():
            mask = False if mask is None else mask
            validate.check_array(name, argument, "a boolean array", mask)
            operands[argument] = jnp.asarray(mask)
            if operands[argument].dtype != jnp.bool_:
                raise TypeError(f"jaxkern.{name}: {argument} must be boolean, got {validate.shown(mask)}")
        try:
            self.shape = jnp.broadcast_shapes(*(x.shape for x in operands.values()))
        except ValueError:
            shapes = ", ".join(f"{argument} of shape {x.shape}" for argument, x in operands.items() if x.ndim)
            raise ValueError(f"jaxkern.{name}: {shapes} do not broadcast") from None
        self.axis = _axis(name, axis, self.shape)
        self.operands = [x.reshape((1,) * (len(self.shape) - x.ndim) + x.shape) for x in operands.values()]

    def carry(self, argument, x=None):
        """The first carry, 0 by default, with all lanes, and split over devices as the operands are."""
        without_axis = lambda dims: tuple(n for a, n in enumerate(dims) if a != self.axis)
        x = 0.0 if x is None else x
        validate.check_array(self.name, argument, "an array of real dtype", x)
        validate.real(self.name, argument, jnp.asarray(x))
        x, lanes = jnp.asarray(x, self.wide), without_axis(self.shape)
        try:
            first = jnp.broadcast_to(x, lanes)
        except ValueError:
            shapes = f"{x.shape} does not broadcast to {lanes}"
            raise ValueError(f"jaxkern.{self.name}: {argument} of shape {shapes}") from None
        specs = zip(*(without_axis(validate.explicit_spec(operand)) for operand in self.operands))
        spec = [next(filter(None, names), None) for names in specs]
        return jax.sharding.reshard(first, PartitionSpec(*spec)) if any(spec) else first

    def scan(self, body, init, reverse=False):
        """The results of body(carry, *operands) in all steps. An operand that is the same in all steps is read once."""
        run = functools.partial(self._scan, body, reverse)
        return along_split_steps(run, self.operands, init, self.axis).astype(self.dtype)

    def _scan(self, body, reverse, operands, init):
        steps = self.shape[self.axis]
        operands = [jnp.moveaxis(x, self.axis, 0) for x in operands]
        widened = lambda x: x if x.dtype == jnp.bool_ else x.astype(self.wide)
        constants = {k: widened(x[0]) for k, x in enumerate(operands) if x.shape[0] == 1 != steps}
        xs = [x for k, x in enumerate(operands) if k not in constants]

        def step(carry, xs):
            xs = iter(xs)
            each = (constants[k] if k in constants else widened(next(xs)) for k in range(len(operands)))
            new, y = body(carry, *each)
            return jax.tree.map(lambda new, old: validate.split_like(new, jax.typeof(old)), new, carry), y

        # A symbolic number of steps cannot be given.
        ys = loop(step, init, xs, length=None if xs else steps, reverse=reverse)[1]
        return jnp.moveaxis(ys, 0, self.axis)
