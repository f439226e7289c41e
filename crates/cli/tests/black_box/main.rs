//! Tests of the built binary from outside: a module for each command or kind of input. They are one binary, since linking
//! one takes seconds; `cargo test -p anemoe --test black_box serve::` runs a module.

mod common;
#[path = "../../../convert/tests/common/mod.rs"]
mod files;
#[path = "../../../hub/tests/common/mod.rs"]
mod hub_server;

mod apis;
mod bad_input;
mod bench;
mod chat;
mod check;
mod doctor;
mod drafters;
mod first_contact;
mod forms;
mod gates;
mod gguf;
mod hub;
mod import_report;
mod journal;
mod messages;
mod outputs;
mod ownership;
mod packages;
mod predict_speed;
mod quantize;
mod report;
mod reproduce;
mod rewritten;
mod sampling;
mod scale_out;
mod serve;
mod spine;
mod stores;
mod wrong_files;
