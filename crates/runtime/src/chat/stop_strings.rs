//! Ends an answer at one of several texts.

/// Texts that end an answer, looked for in a stream of pieces. Text that may be the beginning of a stop string is held back
/// until the next pieces decide.
pub struct StopStrings {
    stops: Vec<String>,
    /// Text that may begin a stop string.
    held: String,
}

impl StopStrings {
    /// Makes a search for `stops`; empty ones do not count.
    pub fn new(stops: impl IntoIterator<Item = String>) -> StopStrings {
        StopStrings { stops: stops.into_iter().filter(|s| !s.is_empty()).collect(), held: String::new() }
    }

    /// Adds a piece. Returns the text that can be shown, and whether a stop string follows it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        if self.stops.is_empty() {
            return (piece.to_string(), false);
        }
        self.held.push_str(piece);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = first {
            let mut shown = std::mem::take(&mut self.held);
            shown.truncate(at);
            return (shown, true);
        }
        let kept = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - kept);
        (std::mem::replace(&mut self.held, held), false)
    }

    /// Returns the text that was held back, when the answer ends without a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Returns the length in bytes of the longest end of `text` that is a beginning of `stop`, but not all of it.
fn overlap(text: &str, stop: &str) -> usize {
    let most = text.len().min(stop.len().saturating_sub(1));
    (1..=most).rev().find(|n| text.as_bytes().ends_with(&stop.as_bytes()[..*n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the text that is shown, and whether a stop string ended it.
    fn shown(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut stop = StopStrings::new(stops.iter().map(|s| s.to_string()));
        let mut text = String::new();
        for piece in pieces {
            let (new, found) = stop.push(piece);
            text += &new;
            if found {
                return (text, true);
            }
        }
        (text + &stop.finish(), false)
    }

    #[test]
    fn a_stop_string_ends_the_text_wherever_pieces_are_cut() {
        let text = "one ä two END three";
        for cut in text.char_indices().map(|(i, _)| i) {
            for second in text.char_indices().map(|(i, _)| i).filter(|i| *i >= cut) {
                let pieces = [&text[..cut], &text[cut..second], &text[second..]];
                assert_eq!(shown(&["END"], &pieces), ("one ä two ".into(), true), "{pieces:?}");
                assert_eq!(shown(&["three", "two"], &pieces), ("one ä ".into(), true), "{pieces:?}");
                assert_eq!(shown(&["threes", "ENDE"], &pieces), (text.into(), false), "{pieces:?}");
            }
        }
    }

    #[test]
    fn only_what_may_begin_a_stop_string_is_held_back() {
        let mut stop = StopStrings::new(["\n\n".to_string(), "ÄÖ".to_string(), String::new()]);
        assert_eq!(stop.push("a\n"), ("a".into(), false));
        assert_eq!(stop.push("b"), ("\nb".into(), false));
        assert_eq!(stop.push("cÄ"), ("c".into(), false));
        assert_eq!(stop.push("Ä"), ("Ä".into(), false));
        assert_eq!(stop.push("Ö."), (String::new(), true));
    }
}
