//! Regenerates checked-in code: `cargo run -p xtask -- proto`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match std::env::args().nth(1).as_deref() {
        Some("proto") => proto(),
        _ => Err("usage: cargo run -p xtask -- proto".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}

/// `crates/mlpackage/proto/coreml.proto` to `crates/mlpackage/src/proto/generated.rs`, without a protoc.
fn proto() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/mlpackage");
    let descriptors = protox::compile([root.join("proto/coreml.proto")], [root.join("proto")])?;
    let out = std::env::temp_dir().join(format!("anemoe-proto-{}", std::process::id()));
    std::fs::create_dir_all(&out)?;
    // Sorted maps: the same model always has the same bytes.
    prost_build::Config::new().btree_map(["."]).out_dir(&out).compile_fds(descriptors)?;
    std::fs::copy(out.join("coreml.rs"), root.join("src/proto/generated.rs"))?;
    std::fs::remove_dir_all(out)?;
    Ok(())
}
