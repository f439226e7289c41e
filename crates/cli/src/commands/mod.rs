//! One file per sub-command.

pub mod assemble;
pub mod bench;
pub mod build;
pub mod calibrate;
pub mod chat;
pub mod check;
pub mod compile;
pub mod completions;
pub mod forms;
pub mod generate;
pub mod golden;
pub mod inspect;
pub mod journal;
pub mod man;
pub mod perplexity;
pub mod plan;
pub mod predict;
pub mod predict_speed;
pub mod quantize;
pub mod quickstart;
pub mod report;
pub mod reproduce;
pub mod serve;
pub mod step;
pub mod trace;
pub mod validate;
