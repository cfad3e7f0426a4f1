"""The spread between the eight schools, by a default fit and by NUTS.

python benchmarks/schools.py [--seeds 3] [--quick] [--out FILE.json]
python benchmarks/schools.py --show benchmarks/schools.json --manual doc      the table of the manual

Quantiles of the spread with their standard errors, in float64; NUTS is NumPyro's, one chain at
target_accept_prob=0.95. Calls are those of the fit, or of the chain with its warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from _harness import command, of, pairs, results, rst, show_tables

from skksivi import KSIVIApproximator, summary
from skksivi.targets import from_numpyro


def non_centred(model: Callable[..., None]) -> Callable[..., None]:
    """Return the eight schools with standardised effects."""
    from numpyro.handlers import reparam
    from numpyro.infer.reparam import LocScaleReparam

    return reparam(model, config={"theta": LocScaleReparam(0)})


#: The forms of the model, and quantiles of its spread.
FORMS, LEVELS = {"non-centred": non_centred, "centred": lambda model: model}, (0.05, 0.5, 0.95)


def eight_schools(y, se):
    """State the model in NumPyro."""
    import numpyro
    from numpyro import distributions as dist

    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("school", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, se), obs=y)


def run(case: str, method: str, seed: int, quick: bool) -> dict[str, Any]:
    """Return the quantiles of tau with their standard errors, by a fit or by NUTS."""
    import jax
    import numpyro
    from arviz_stats.base import array_stats

    torch.set_num_threads(1)
    numpyro.enable_x64()
    n = 50 if quick else 1000
    model = FORMS[case](eight_schools)
    data = np.array([[28.0, 8, -3, 7, -1, 1, 18, 12], [15.0, 10, 16, 11, 9, 11, 10, 18]])
    if method == "skksivi":
        target = from_numpyro(model, *data)
        q = KSIVIApproximator(random_state=seed).fit(target)
        tau = summary(q, target, random_state=seed).to_frame().loc["tau"]
        quantiles = [[tau[f"{level:.0%}{which}"] for level in LEVELS] for which in ("", "_se")]
        return {"quantiles": quantiles, "calls": q.n_score_calls_}
    nuts = numpyro.infer.NUTS(model, target_accept_prob=0.95)
    mcmc = numpyro.infer.MCMC(nuts, num_warmup=n, num_samples=2 * n, progress_bar=False)
    mcmc.warmup(jax.random.PRNGKey(seed), *data, extra_fields=("num_steps",), collect_warmup=True)
    calls = int(mcmc.get_extra_fields()["num_steps"].sum())
    mcmc.run(mcmc.post_warmup_state.rng_key, *data, extra_fields=("num_steps", "diverging"))
    tau, fields = np.asarray(mcmc.get_samples(group_by_chain=True)["tau"]), mcmc.get_extra_fields()
    errors = [float(array_stats.mcse(tau, method="quantile", prob=level)) for level in LEVELS]
    return {
        "quantiles": [np.quantile(tau, LEVELS).tolist(), errors],
        "calls": calls + int(fields["num_steps"].sum()),
        "n_effective": float(array_stats.ess(tau)),
        "divergences": int(fields["diverging"].sum()),
    }


def cells_of(found: dict[str, list]) -> tuple[str, ...]:
    values, errors = np.array(found["quantiles"]).transpose(1, 2, 0)
    notes = ""
    if found["divergences"]:
        notes = f"{np.median(found['divergences']):.0f}; {np.median(found['n_effective']):,.0f}"
    cells = (f"{np.median(value):.2f} ± {np.median(error):.2f}" for value, error in zip(values, errors, strict=True))
    return *cells, f"{np.median(found['calls']) / 1000:.0f}k", notes


def main() -> None:
    args = command(__doc__).parse_args()
    n_seeds = 1 if args.quick else args.seeds
    jobs = [(form, method, k) for form in FORMS for method in ("skksivi", "NUTS") for k in range(n_seeds)]
    rows = results(args, jobs, partial(run, quick=args.quick))["rows"]
    heads = ("Form", "Method", *(f"{level:.0%}" for level in LEVELS), "Calls", "Divergences; ESS")
    keys = "quantiles", "calls", "n_effective", "divergences"
    found = {pair: {key: of(rows, key, case=pair[0], method=pair[1]) for key in keys} for pair in pairs(rows)}
    show_tables(args, {"schools": rst(heads, [(*pair, *cells_of(each)) for pair, each in found.items()])})


if __name__ == "__main__":
    main()
