//! Tests of bundles of both families, from plan over rules to model. They are one binary, since linking each takes seconds.

mod assistants;
mod common;
mod families;
mod forms;
mod fused;
mod planned;
mod sequence_properties;
mod sequences;
mod speculation;
mod weight_damage;
