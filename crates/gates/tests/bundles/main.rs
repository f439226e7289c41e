//! Bundles of both families, built here, through plan, rules and model. One binary, since each costs seconds to link.

mod common;
mod forms;
mod fused;
mod planned;
mod sequence_properties;
mod sequences;
mod speculation;
