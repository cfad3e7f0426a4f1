"""How many generated cases of each class of fault go wrong: the property tests of tests/, counted.

python benchmarks/faults.py [--quick] [--out faults.json] [--show [FILE]]

A case is one parameter of a test, one example of a property, or one of those that a test goes through and records as
"cases"; a test that fails is one wrong case, or as many as it records as "wrong".
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import pytest
from _harness import command, print_table, results

TESTS = Path(__file__).resolve().parents[1] / "tests"
OPTIONS = [
    "-p no:cacheprovider", "-p no:terminal", "-o", "addopts=-p no:randomly --import-mode=importlib",
    "-W", "ignore::pytest.PytestAssertRewriteWarning", f"--rootdir={TESTS.parent}",
    f"-c{TESTS.parent}/pyproject.toml",
]  # fmt: skip

#: Tests of each class, as file: names.
CLASSES = {
    "the checkpoint of another fit is resumed": {
        "test_checkpoint": "a_checkpoint_is_of_one_score a_checkpoint_is_of_one_setting "
        "what_returns_the_same_resumes "
        "the_score_counts_where_the_fit_is what_cannot_be_identified_is_refused",
    },
    "candidates of a search share a checkpoint": {
        "test_checkpoint": "a_search_below_a_folder_is_one_without_checkpoints",
    },
    "a score is written into memory that is used again": {
        "test_awkward_scores": "a_result_outlives_the_next_call a_score_is_no_view_of_its_points "
        "a_density_in_a_buffer_outlives_the_next_call a_product_that_forgets_the_points_at_the_next_call_is_refused",
    },
    "float32 cannot tell draws apart": {
        "test_common": "draws_can_be_told_apart_however_far_they_are_from_the_origin",
    },
    "lost tails are not reported": {
        "test_diagnostics": "no_report_on_tails_that_are_cut_off_is_ok tails_that_are_cut_off_are_seen_by_chains "
        "lost_tails_are_seen_by_the_importance_ratios_and_by_chains",
    },
    "a warm start stays where it was": {
        "test_ksivi": "a_warm_start_goes_most_of_the_way_to_a_target_that_has_moved "
        "a_warm_start_follows_a_target_that_has_moved",
    },
    "the target is improper, or its score not finite": {
        "test_score": "a_flat_direction_is_found_and_no_other tails_that_have_no_finite_mass_are_warned_of "
        "an_improper_target_is_refused_before_the_score_is_asked_for_much",
        "test_callbacks": "a_flat_score_ends_at_once",
        "test_hksivi": "rows_that_a_score_spoils_are_drawn_again",
        "test_faults": "a_region_where_the_score_is_not_finite_is_told_and_the_draws_are_finite",
    },
    "parameters have bounds": {
        "test_awkward_scores": "a_target_with_bounds_is_told_how_to_transform_it "
        "a_bound_of_one_coordinate_of_many_is_told a_distribution_with_bounds_is_told_how_to_transform_it "
        "numbers_that_leave_their_range_are_no_bound",
        "targets/test_constrained": "parameters_and_points_are_one_to_one the_volume_is_that_of_autograd "
        "the_density_is_that_of_the_change_of_variables the_score_has_a_right_graph a_mistake_is_named",
    },
    "minibatches of many rows are noisy or biased": {
        "targets/test_minibatches": "minibatches_of_any_data_are_right_at_the_mode_and_in_the_mean "
        "blocks_of_rows_give_the_score_and_products_of_all_of_them "
        "corrected_parts_have_the_score_and_product_of_all_as_their_mean",
    },
    "a table for regression is degenerate": {
        "test_predictors": "tables_of_any_kind_and_scale_are_fitted "
        "copies_of_rows_and_weights_leave_intervals_honest",
        "test_process": "the_evidence_is_finite_wherever_it_is_searched "
        "data_without_noise_or_signal_have_a_proper_posterior",
    },
    "ArviZ cannot read the draws": {
        "test_export": "any_parameters_have_a_summary_by_their_names arviz_takes_them",
    },
    "second derivatives are missing or NaN": {
        "test_awkward_scores": "second_derivatives_that_are_nan_end_no_fit "
        "second_derivatives_that_are_nan_are_differences "
        "where_torch_lacks_a_second_derivative_products_are_differences",
    },
    "rows of a score depend on each other": {
        "test_awkward_scores": "rows_that_depend_on_each_other_are_refused "
        "a_distance_to_a_score_of_coupled_rows_is_refused "
        "rounding_that_depends_on_the_size_of_the_batch_is_no_coupling",
    },
    "training is worse than its start": {
        "test_ksivi": "no_training_is_worse_than_its_exact_start a_training_that_spoils_a_good_start_returns_it",
    },
    "modes far apart are too wide": {
        "test_mixture": "modes_have_the_means_shares_and_variances_of_their_points_however_far_apart",
        "test_diagnostics": "the_stein_variance_of_a_mode_does_not_mind_the_others",
        "test_ksivi": "modes_have_their_widths_at_any_distance",
    },
    "a message names the wrong remedy": {
        "test_remedies": "what_is_said_helps",
        "test_ksivi": "a_width_that_is_off_is_told_with_a_remedy_that_helps draws_far_too_wide_or_narrow_are_told",
    },
    "a checkpoint cannot be written or read": {
        "test_checkpoint": "a_disk_that_breaks_during_a_fit_costs_no_fit an_interrupted_fit_resumes_bit_for_bit "
        "a_checkpoint_that_cannot_be_written_is_told_before_the_fit "
        "a_checkpoint_that_cannot_be_read_is_not_called_damaged other_files_are_refused",
        "test_faults": "an_error_at_any_call_leaves_the_earlier_fit_or_a_whole_one",
    },
    "a file was crafted": {
        "test_persistence": "a_crafted_file_is_refused_by_name_or_opened damage_at_any_place_is_found "
        "a_state_that_lies_is_refused no_size_is_larger_than_the_file "
        "other_files_are_refused_and_nothing_in_them_is_run",
        "datasets/test_fetchers": "what_unpacks_without_bound_is_refused a_server_that_comes_to_no_end_is_left "
        "a_folder_that_cannot_be_used_is_told_by_name",
    },
    "data, a module or a function take another type or shape": {
        "test_brought": "a_density_is_evaluated_in_the_type_that_it_takes a_density_of_single_precision_is_fitted "
        "inference_tensors_are_told_by_their_name a_function_of_one_point_is_told",
    },
    "units differ by powers of ten": {"test_brought": "a_gaussian_in_physical_units_is_no_asymmetric_score"},
    "a branch has a derivative that is NaN": {
        "test_brought": "a_branch_whose_derivative_is_nan_is_told_by_its_point",
    },
    "a density ends at minus infinity": {
        "test_brought": "a_bound_is_told_once_and_nothing_else_is "
        "both_bounds_are_found_where_the_density_vanishes_at_one",
    },
    "a density has no finite mass": {
        "test_brought": "a_density_of_infinite_mass_is_refused_with_its_direction a_proper_density_is_never_refused",
    },
    "a search comes to no end": {
        "test_brought": "a_search_that_comes_to_no_end_has_a_total a_fit_that_comes_to_no_end_returns_the_best",
    },
    "a score has the wrong sign": {"test_brought": "a_wrong_sign_is_told_once"},
    "a density is periodic": {
        "test_brought": "coordinates_of_one_period_have_the_density_of_the_angle an_angle_is_fitted_on_one_period "
        "an_angle_of_numpyro_is_fitted an_angle_of_pymc_is_fitted "
        "a_periodic_density_is_told_with_one_period_to_keep_to equal_modes_at_equal_distances_are_no_period",
    },
    "a remedy cannot be applied": {
        "test_brought": "a_column_that_holds_no_numbers_is_named a_search_that_is_lost_names_the_parameter "
        "a_folder_that_is_missing_is_named_as_given minibatches_of_pymc_are_refused_with_what_works",
    },
    "a mistake is met by silence or another library's error": {
        "test_awkward_scores": "a_wrong_n_features_is_named_with_the_right_one a_density_that_leaves_torch_is_named "
        "a_wrong_n_features_of_a_density_is_named_with_the_right_one a_truth_value_is_no_number_of_features "
        "numbers_of_one_type_alone_are_named_with_what_to_set a_class_in_the_place_of_a_target_is_refused",
        "test_common": "a_mistake_before_or_in_fit_gives_a_clear_error a_mistake_after_fit_gives_a_clear_error",
        "test_score": "a_mistake_is_named",
        "test_parameters": "a_mistake_is_named_with_its_object a_part_that_is_none_is_refused_and_nothing_changes",
        "test_model_selection": "what_would_split_rows_says_to_set_replicates",
    },
}


class Counter:
    """A plugin that counts cases and those that are wrong; of a quick run, one item of each quick test."""

    def __init__(self, quick):
        self.quick, self.cases, self.wrong, self.properties = quick, 0, 0, set()

    def pytest_collection_modifyitems(self, items):
        if self.quick:
            items[:] = {item.originalname: item for item in reversed(items)}.values()
        for handle in {item.function: item.function.hypothesis for item in items if is_property(item)}.values():
            handle.inner_test = self.counting(handle.inner_test)

    def counting(self, test):
        @functools.wraps(test)
        def counted(*args, **kwargs):
            test(*args, **kwargs)
            self.cases += 1

        return counted

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        told = dict(report.user_properties)
        if report.when == "call" and not report.skipped and not (is_property(item) and report.passed):
            self.cases += told.get("cases", 1)
        if report.failed:
            self.wrong += told.get("wrong", 1)
            print(report.nodeid, report.longreprtext, sep="\n", file=sys.stderr)
        return report


def is_property(item):
    return hasattr(item.function, "hypothesis")


def run(case, quick):
    """Run the tests of a class, and count."""
    counter, start = Counter(quick), time.perf_counter()
    options = ["-m", "not slow", "--hypothesis-profile=quick"] if quick else ["--hypothesis-profile=full"]
    tests = [f"{TESTS}/{file}.py::test_{name}" for file, names in CLASSES[case].items() for name in names.split()]
    code = pytest.main([*OPTIONS, *options, *tests], plugins=[counter])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"The tests of '{case}' did not run; pytest returned {code!r}.")
    return {"cases": counter.cases, "wrong": counter.wrong, "seconds": round(time.perf_counter() - start, 1)}


def main():
    args = command(__doc__, seeds=1).parse_args()
    jobs = [(case, "tests", 0) for case in CLASSES]
    document = results(args, jobs, lambda case, *_: run(case, args.quick))
    rows = [(row["case"], row["cases"], row["wrong"]) for row in document["rows"]]
    print_table(("", "cases", "wrong"), [*rows, ("all", sum(r[1] for r in rows), sum(r[2] for r in rows))])


if __name__ == "__main__":
    main()
