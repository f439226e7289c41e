//! Plan reports of a Mac, as `check --report` reads them.
#![no_main]

use anemoe_gates::residency::compare::compare;
use anemoe_gates::residency::device::PlanReport;
use anemoe_gates::residency::{self, CheckOptions, Report};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::OnceLock;

fuzz_target!(|input: &[u8]| {
    static CHECKED: OnceLock<Report> = OnceLock::new();
    let checked = CHECKED.get_or_init(|| {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/runtime/tests/interop");
        let options = CheckOptions { list_ops: true, ..CheckOptions::default() };
        residency::package(&tests.join("functions_s/functions_s.mlpackage"), &options).expect("a fixture")
    });
    let Ok(report) = PlanReport::parse(input) else { return };
    let mut checked = checked.clone();
    compare(&mut checked, &report);
    let _ = serde_json::to_vec(&checked).expect("a report is written");
});
