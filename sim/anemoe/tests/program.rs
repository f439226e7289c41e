//! Runs the program on the fake Core ML as a user does.

mod common;

use common::{Sandbox, TINY};

#[test]
fn a_bundle_is_compiled_and_runs_as_on_the_cpu() {
    for fixture in TINY {
        let sandbox = Sandbox::new();
        let bundle = sandbox.build(fixture, &[]);
        let b = bundle.to_str().unwrap();
        let generate = ["generate", b, "--prompt-ids", "1,2,3,4", "--max-new", "12", "--ignore-eos"];
        let on_core_ml = [&generate[..], &["--backend", "coreml"]].concat();
        let on_cpu = [&generate[..], &["--backend", "cpu", "--precision", "fp16"]].concat();
        sandbox.refused(&on_core_ml, &["anemoe compile"]);
        sandbox.json(0, &["compile", b]);
        let (core_ml, cpu) = (sandbox.json(0, &on_core_ml), sandbox.json(0, &on_cpu));
        assert_eq!(core_ml["generated_ids"], cpu["generated_ids"], "{fixture}");
        let bench = ["bench", b, "--backend", "coreml", "--context", "4", "--decode", "2", "--prefill", "8"];
        let bench = sandbox.json(0, &[&bench[..], &["--verify-tokens", "2", "--repetitions", "1"]].concat());
        assert_eq!(bench["mode"], "coreml");
    }
}
