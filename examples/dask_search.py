"""
A search on many machines
=========================

Fits of a search do not depend on one another, and joblib sends them wherever its backend says. Here that is a cluster
of `dask <https://distributed.dask.org>`_: two worker processes of this machine, or the cluster whose scheduler you
name, ``python examples/dask_search.py --scheduler tcp://host:8786``. The search itself is scikit-learn's, and its
table is the same as in one process: the seed of each fit comes from its fold. A worker that dies is replaced and its
fits are repeated.

Needs ``pip install '.[dask]'``, and the same versions of everything on all machines.
"""

import numpy as np
from joblib import parallel_config
from sklearn.model_selection import GridSearchCV

from skksivi import KSIVIApproximator
from skksivi.model_selection import Replicates, neg_ksd_scorer
from skksivi.targets import XShaped

SCHEDULER = None  # address of a running scheduler; None starts two local workers
MAX_ITER = 1000
# sphinx_gallery_thumbnail_path = "_static/guide/cluster.png"
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--scheduler", default=SCHEDULER, help="address of a running scheduler")
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
args, _ = parser.parse_known_args()
SCHEDULER = args.scheduler
MAX_ITER = args.max_iter
# sphinx_gallery_end_ignore


def main():
    from distributed import Client, LocalCluster

    search = GridSearchCV(
        KSIVIApproximator(whiten="laplace", max_iter=MAX_ITER, random_state=0),
        {"bandwidth": [0.2, 0.7, 2.0], "learning_rate": [5e-4, 2e-3, 1e-2]},
        scoring=neg_ksd_scorer(),
        cv=Replicates(2),
    )
    # one thread a worker: threads of one process would wait for one another
    cluster = SCHEDULER or LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with Client(cluster) as client, parallel_config("dask", wait_for_workers_timeout=60):
        print(f"{len(client.scheduler_info()['workers'])} workers at {client.scheduler.address}")
        search.fit(XShaped())

    for rank in np.argsort(search.cv_results_["rank_test_score"]):
        parameters = ", ".join(f"{name} {value:g}" for name, value in search.cv_results_["params"][rank].items())
        print(f"{parameters:<36}{search.cv_results_['mean_test_score'][rank]:>12.4f}")
    print(f"10,000 draws of the best have sds {search.best_estimator_.sample(10_000).std(0).round(2)}")
    if SCHEDULER is None:
        cluster.close()


if __name__ == "__main__":  # the workers import this file
    main()
