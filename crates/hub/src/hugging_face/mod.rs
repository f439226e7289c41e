//! `hf:OWNER/NAME`: names, settings, the cache, and downloads into it.

mod fetch;
mod hub_cache;
mod hub_file;
mod hub_settings;
mod hub_spec;
mod listing;
mod open_checkpoint;
mod range_log;

pub use fetch::{Hub, Snapshot};
pub use hub_settings::HubSettings;
pub use hub_spec::HubSpec;
pub use open_checkpoint::Peeked;
