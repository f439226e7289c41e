//! Generates Rust code of Core ML's protocol buffers.

use crate::task::{Passed, root};

/// Compiles `crates/mlpackage/proto/coreml.proto` to `crates/mlpackage/src/proto/generated.rs`, without protoc.
pub fn write() -> Passed {
    let crate_root = root().join("crates/mlpackage");
    let descriptors = protox::compile([crate_root.join("proto/coreml.proto")], [crate_root.join("proto")])?;
    let out = std::env::temp_dir().join(format!("anemoe-proto-{}", std::process::id()));
    std::fs::create_dir_all(&out)?;
    // Sorted maps, so that the same model always has the same bytes.
    prost_build::Config::new().btree_map(["."]).out_dir(&out).compile_fds(descriptors)?;
    std::fs::copy(out.join("coreml.rs"), crate_root.join("src/proto/generated.rs"))?;
    std::fs::remove_dir_all(out)?;
    Ok(true)
}
