//! Counters of a server, and their text for Prometheus.

use anemoe_io::locked;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Upper bounds of a histogram's buckets, in seconds.
const BOUNDS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// A counter, or a gauge.
#[derive(Default)]
pub struct Number(AtomicU64);

impl Number {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Subtracts `n`.
    pub fn remove(&self, n: u64) {
        self.0.fetch_sub(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Histogram of durations.
#[derive(Default)]
pub struct TimeHistogram {
    /// Counts per bound, and of durations above the last bound.
    counts: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl TimeHistogram {
    /// Counts a duration.
    pub fn note(&self, seconds: f64) {
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
    }
}

/// All counters of a server.
#[derive(Default)]
pub struct ServerCounters {
    /// Number of answers by path and status.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// Open connections.
    pub connections: Number,
    /// Jobs in slots.
    pub running: Number,
    /// Jobs in the queue.
    pub waiting: Number,
    /// Sequences that are kept as prefixes of later prompts.
    pub prefixes: Number,
    /// Tokens of prompts.
    pub prompt_tokens: Number,
    /// Prompt tokens that were reused.
    pub reused_tokens: Number,
    /// New tokens.
    pub generated_tokens: Number,
    /// Passes over a draft.
    pub verifier_passes: Number,
    /// Passes without a draft although there was a match.
    pub draft_fallbacks: Number,
    /// Tokens that were drafted.
    pub drafted_tokens: Number,
    /// Drafted tokens that were right.
    pub accepted_tokens: Number,
    /// Tokens that a drafter drafted.
    pub drafter_tokens: Number,
    /// Tokens of a drafter that were right.
    pub drafter_accepted: Number,
    /// Time of drafters, in microseconds.
    pub drafter_microseconds: Number,
    /// Passes of the model.
    pub passes: Number,
    /// Tokens of all passes.
    pub pass_tokens: Number,
    /// Duration of a pass.
    pub pass_seconds: TimeHistogram,
    /// Duration from admission to the first token.
    pub first_token_seconds: TimeHistogram,
    /// Duration between two tokens of a stream.
    pub between_tokens_seconds: TimeHistogram,
}

impl ServerCounters {
    /// Counts an answer to a request by path and status.
    pub fn count_request(&self, path: &'static str, status: u16) {
        let mut requests = locked(&self.requests);
        *requests.entry((path, status)).or_insert(0) += 1;
    }

    /// Returns the counters in Prometheus's text format.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let requests = locked(&self.requests);
        let _ = writeln!(
            out,
            "# HELP anemoe_requests_total Answers to requests.\n# TYPE anemoe_requests_total counter"
        );
        for ((path, status), n) in requests.iter() {
            let _ = writeln!(out, "anemoe_requests_total{{path=\"{path}\",status=\"{status}\"}} {n}");
        }
        for (name, kind, help, number) in [
            ("connections", "gauge", "Open connections.", &self.connections),
            ("running", "gauge", "Sequences that run.", &self.running),
            ("waiting", "gauge", "Jobs that wait.", &self.waiting),
            ("prefixes", "gauge", "Sequences that are kept.", &self.prefixes),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", &self.prompt_tokens),
            ("reused_tokens_total", "counter", "Tokens of prompts that were known.", &self.reused_tokens),
            ("generated_tokens_total", "counter", "New tokens.", &self.generated_tokens),
            ("verifier_passes_total", "counter", "Passes over a draft.", &self.verifier_passes),
            ("draft_fallbacks_total", "counter", "Matches that no draft was worth.", &self.draft_fallbacks),
            ("drafted_tokens_total", "counter", "Tokens that were drafted.", &self.drafted_tokens),
            ("accepted_tokens_total", "counter", "Drafted tokens that were right.", &self.accepted_tokens),
            ("drafter_tokens_total", "counter", "Tokens of a drafter.", &self.drafter_tokens),
            (
                "drafter_accepted_total",
                "counter",
                "Tokens of a drafter that were right.",
                &self.drafter_accepted,
            ),
            ("drafter_microseconds_total", "counter", "Time of drafters.", &self.drafter_microseconds),
            ("passes_total", "counter", "Passes of the model.", &self.passes),
            ("pass_tokens_total", "counter", "Tokens of all passes.", &self.pass_tokens),
        ] {
            let _ = writeln!(
                out,
                "# HELP anemoe_{name} {help}\n# TYPE anemoe_{name} {kind}\nanemoe_{name} {}",
                number.get()
            );
        }
        for (name, help, histogram) in [
            ("pass_seconds", "Time of a pass.", &self.pass_seconds),
            ("first_token_seconds", "Time from admission to the first token.", &self.first_token_seconds),
            ("between_tokens_seconds", "Time between tokens of a stream.", &self.between_tokens_seconds),
        ] {
            let _ = writeln!(out, "# HELP anemoe_{name} {help}\n# TYPE anemoe_{name} histogram");
            let mut sum = 0;
            for (i, count) in histogram.counts.iter().enumerate() {
                sum += count.load(Ordering::Relaxed);
                let bound = BOUNDS.get(i).map_or("+Inf".into(), f64::to_string);
                let _ = writeln!(out, "anemoe_{name}_bucket{{le=\"{bound}\"}} {sum}");
            }
            let seconds = histogram.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
            let _ = writeln!(out, "anemoe_{name}_sum {seconds}\nanemoe_{name}_count {sum}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up() {
        let metrics = ServerCounters::default();
        metrics.count_request("/v1/models", 200);
        for seconds in [0.0005, 0.001, 0.3, 99.0] {
            metrics.pass_seconds.note(seconds);
        }
        let text = metrics.render();
        for line in [
            "anemoe_requests_total{path=\"/v1/models\",status=\"200\"} 1",
            "anemoe_pass_seconds_bucket{le=\"0.001\"} 2",
            "anemoe_pass_seconds_bucket{le=\"0.5\"} 3",
            "anemoe_pass_seconds_bucket{le=\"+Inf\"} 4",
            "anemoe_pass_seconds_count 4",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
