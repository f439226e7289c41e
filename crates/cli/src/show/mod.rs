//! Tables and lines that commands print for people.

pub mod bench_tables;
pub mod build_report;
pub mod gate_results;
pub mod placement;
pub mod plan_table;
pub mod speed;
