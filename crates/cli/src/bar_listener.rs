//! Messages and progress of the Mac's commands.

use crate::ui::{Ui, message};
use anemoe_mac::Listener;
use indicatif::ProgressBar;
use std::cell::RefCell;

/// Shows messages on standard error, and progress as a bar on a terminal.
pub struct BarListener<'a> {
    ui: &'a Ui,
    /// The bar, and what it is of.
    bar: RefCell<Option<(String, ProgressBar)>>,
}

impl<'a> BarListener<'a> {
    /// Makes a listener without a bar.
    pub fn new(ui: &'a Ui) -> BarListener<'a> {
        BarListener { ui, bar: RefCell::new(None) }
    }
}

impl Listener for BarListener<'_> {
    fn message(&self, text: &str) {
        match &*self.bar.borrow() {
            Some((_, bar)) => bar.suspend(|| message(text)),
            None => message(text),
        }
    }

    fn progress(&self, what: &str, part: &str, done: usize, total: usize) {
        let mut shown = self.bar.borrow_mut();
        let same = shown.take().filter(|(of, _)| of == what);
        let (_, bar) = same.unwrap_or_else(|| (what.into(), self.ui.bar(total as u64, what)));
        bar.set_length(total as u64);
        bar.set_position(done as u64);
        bar.set_message(part.to_string());
        if done < total {
            *shown = Some((what.into(), bar));
        } else {
            bar.finish_and_clear();
        }
    }
}
