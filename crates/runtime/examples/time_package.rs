//! Runs a package once for each line of standard input and prints the milliseconds of each run; at the end writes the
//! outputs: `cargo run --release -p anemoe-runtime --example time_package -- MODEL.mlpackage IN.npz OUT.npz [fp32|fp16] [ops]`.
//!
//! With `ops` it prints the time of each operation too. `benches/coremltools_models.py` makes packages.

use anemoe_npz::{read_npz, write_npz};
use anemoe_runtime::cpu::{CpuPackage, CpuStates, Options, Precision};
use anemoe_runtime::predict::{bind, results};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

type AnyError = Box<dyn std::error::Error>;

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [package, inputs, outputs, options @ ..] = args.as_slice() else {
        return Err("usage: time_package MODEL.mlpackage IN.npz OUT.npz [fp32|fp16] [ops]".into());
    };
    let has = |name: &str| options.iter().any(|o| o == name);
    let precision = if has("fp16") { Precision::Fp16 } else { Precision::Fp32 };
    let options = Options { precision, profile: has("ops"), ..Options::default() };
    let function = CpuPackage::open(Path::new(package))?.compile(None, options)?;
    let mut states = CpuStates::new(&function);
    let path = Path::new(inputs);
    let inputs = bind(&function, &mut states, read_npz(path)?, path)?;
    let inputs: Vec<_> = inputs.iter().collect();
    let mut found = Vec::new();
    for line in std::io::stdin().lines() {
        line?;
        let started = Instant::now();
        function.run(&inputs, &mut states, &mut found)?;
        println!("{:.3}", started.elapsed().as_secs_f64() * 1e3);
    }
    write_npz(Path::new(outputs), &results(&function, &found, &states, precision))?;
    let mut by_type: BTreeMap<String, (Duration, usize)> = BTreeMap::new();
    for op in function.op_times() {
        let sum = by_type.entry(op.op_type).or_default();
        *sum = (sum.0 + op.time, sum.1 + 1);
    }
    let mut by_type: Vec<_> = by_type.into_iter().collect();
    by_type.sort_by_key(|(_, (time, _))| std::cmp::Reverse(*time));
    for (op, (time, n)) in by_type {
        eprintln!("{op:24} {n:4} {:9.3} ms", time.as_secs_f64() * 1e3);
    }
    Ok(())
}
