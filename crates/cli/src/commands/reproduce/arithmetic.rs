//! Tests of the field notes' arithmetic; `docs/recipes.md` has the table.

use anemoe_runtime::speculate::break_even;

/// Seconds of verifier calls, and number of these calls.
const CALLS: (f64, f64) = (15.455, 32.0);
/// Tokens per second without drafts.
const PLAIN: f64 = 9.25;

/// Computes `(1 - p^(k + 1)) / (1 - p)`: the expected tokens of a call with `k` drafted tokens, each accepted with
/// probability `p` if those before it are.
fn expected(p: f64, k: i32) -> f64 {
    (1.0 - p.powi(k + 1)) / (1.0 - p)
}

#[test]
fn counts_and_times_are_right() {
    assert_eq!(32 * 3, 96);
    assert_eq!(32 + 7 + 1, 40);
    assert_eq!(format!("{:.1}", 100.0 * 7.0 / 96.0), "7.3");
    assert_eq!(format!("{:.0}", 1e3 * CALLS.0 / CALLS.1), "483");
    assert_eq!(format!("{:.1}", 100.0 * (PLAIN / 8.59 - 1.0)), "7.7");
}

#[test]
fn break_even_and_projection_are_not() {
    let call = CALLS.0 / CALLS.1;
    let cost = call * 1e3 / 109.0;
    assert_eq!(format!("{cost:.2}"), "4.43");
    assert_eq!(format!("{:.2}", 1.0 - 1.0 / (cost / 4.0)), "0.10");
    assert_eq!(break_even(cost, 3), None, "four tokens at most cannot pay for 4.43");
    // If a call costs less than its most tokens, drafts pay from the `p` whose expected tokens equal the cost.
    let p = break_even(2.53, 3).unwrap();
    assert!((p - 0.7).abs() < 0.01, "{p}");
    assert_eq!(format!("{:.1}", (1.0 + 3.0 * 0.7) / call), "6.4");
    assert_eq!(format!("{:.2}", expected(0.7, 3)), "2.53");
    assert_eq!(format!("{:.2}", expected(0.7, 3) / call), "5.24");
    assert!(expected(1.0 - 1e-9, 3) / call < PLAIN);
}

#[test]
fn bytes_a_second_are_not_the_bound_at_lut4() {
    // GB per token (docs/recipes.md) times tokens per second; 119 GB/s were measured on an M4 Max.
    let (lut4, int8) = (4.54 * PLAIN, 8.84 * 8.59);
    assert_eq!((format!("{lut4:.0}"), format!("{int8:.0}")), ("42".into(), "76".into()));
    assert!(lut4 < 0.6 * int8 && int8 < 0.7 * 119.0);
}
