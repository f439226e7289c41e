//! Text and bounds of the text gate.

use super::text_windows::read_text;
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_gates::checkpoint_text::gate_text;
use anemoe_gates::text_gate::{GateText, TextBounds};
use std::path::PathBuf;

/// Text over which a bundle's predictions are compared with its checkpoint's, and what they may differ by.
#[derive(clap::Args, Clone)]
pub struct TextGateArgs {
    /// Text in UTF-8 over which predictions are compared with the checkpoint's [default: 2,048 tokens of a built-in text].
    #[arg(long, value_name = "FILE")]
    gate_text: Option<PathBuf>,
    /// Largest mean divergence from the checkpoint over the text, in nats.
    #[arg(long, value_name = "NATS", default_value_t = TextBounds::default().mean_kl)]
    gate_kl: f64,
    /// Largest divergence that 99 % of the text's tokens have, in nats.
    #[arg(long, value_name = "NATS", default_value_t = TextBounds::default().p99_kl)]
    gate_p99_kl: f64,
    /// Least share of the text's tokens after which both find the same token the most probable.
    #[arg(long, value_name = "SHARE", default_value_t = TextBounds::default().top1_agreement)]
    gate_top1: f64,
    /// Largest perplexity over the text, in units of the checkpoint's: the lower end of the interval of 95 % counts.
    #[arg(long, value_name = "RATIO", default_value_t = TextBounds::default().perplexity_ratio)]
    gate_perplexity: f64,
}

impl TextGateArgs {
    /// Tells whether the text is the user's.
    pub fn has_text(&self) -> bool {
        self.gate_text.is_some()
    }

    /// Refuses text and bounds where no checkpoint is given to compare with.
    pub fn expect_default(&self) -> anyhow::Result<()> {
        let default = TextBounds::default();
        let own = [
            ("--gate-text", self.gate_text.is_some()),
            ("--gate-kl", self.gate_kl != default.mean_kl),
            ("--gate-p99-kl", self.gate_p99_kl != default.p99_kl),
            ("--gate-top1", self.gate_top1 != default.top1_agreement),
            ("--gate-perplexity", self.gate_perplexity != default.perplexity_ratio),
        ];
        match own.into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => anyhow::bail!("{option} compares with the checkpoint: give --checkpoint"),
            None => Ok(()),
        }
    }

    /// Returns the bounds.
    pub fn bounds(&self) -> anyhow::Result<TextBounds> {
        for (option, value) in [
            ("--gate-kl", self.gate_kl),
            ("--gate-p99-kl", self.gate_p99_kl),
            ("--gate-top1", self.gate_top1),
            ("--gate-perplexity", self.gate_perplexity),
        ] {
            anyhow::ensure!(value >= 0.0, "{option} {value}: not a number from 0 on");
        }
        let top1 = self.gate_top1;
        anyhow::ensure!(top1 <= 1.0, "--gate-top1 {top1}: a share is at most 1");
        Ok(TextBounds {
            mean_kl: self.gate_kl,
            p99_kl: self.gate_p99_kl,
            top1_agreement: self.gate_top1,
            perplexity_ratio: self.gate_perplexity,
        })
    }

    /// Cuts the text into windows for a model with this vocabulary and context.
    pub fn text(&self, checkpoint: &Checkpoint, vocab: usize, context: usize) -> anyhow::Result<GateText> {
        let own = match &self.gate_text {
            Some(path) => Some((read_text(path)?, path.display().to_string())),
            None => None,
        };
        Ok(gate_text(checkpoint, vocab, context, own)?)
    }
}
