//! Ends an answer at one of several texts.

/// Texts that end an answer, looked for in a stream of pieces. Text that may be the beginning of a stop string is held back
/// until the next pieces decide. Each byte is looked at once for each stop string, however long these are.
pub struct StopStrings {
    stops: Vec<StopString>,
    /// Text that may begin a stop string.
    held: String,
}

/// A stop string, and how much of it the text ends with (the search of Knuth, Morris and Pratt).
struct StopString {
    text: String,
    /// For each beginning of the text, the length of the longest shorter one that it ends with.
    shorter: Vec<usize>,
    matched: usize,
}

impl StopString {
    fn new(text: String) -> StopString {
        let mut stop = StopString { shorter: vec![0; text.len() + 1], text, matched: 0 };
        for i in 1..stop.text.len() {
            stop.push(stop.text.as_bytes()[i]);
            stop.shorter[i + 1] = stop.matched;
        }
        stop.matched = 0;
        stop
    }

    /// Adds a byte of the text. Tells whether the text now ends with the stop string.
    fn push(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes.get(self.matched) != Some(&byte) {
            self.matched = self.shorter[self.matched];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
        self.matched == bytes.len()
    }
}

impl StopStrings {
    /// Makes a search for `stops`; empty ones do not count.
    pub fn new(stops: impl IntoIterator<Item = String>) -> StopStrings {
        let stops = stops.into_iter().filter(|s| !s.is_empty()).map(StopString::new).collect();
        StopStrings { stops, held: String::new() }
    }

    /// Adds a piece. Returns the text that can be shown, and whether a stop string follows it: the one that ends first.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        for (i, byte) in piece.bytes().enumerate() {
            let mut longest = 0;
            for stop in &mut self.stops {
                if stop.push(byte) {
                    longest = longest.max(stop.text.len());
                }
            }
            if longest > 0 {
                let mut shown = std::mem::take(&mut self.held);
                shown.push_str(&piece[..=i]);
                shown.truncate(shown.len() - longest);
                return (shown, true);
            }
        }
        self.held.push_str(piece);
        let kept = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        (self.held.drain(..self.held.len() - kept).collect(), false)
    }

    /// Returns the stop string that ended the text; the longest of several.
    pub fn found(&self) -> Option<&str> {
        let found = self.stops.iter().filter(|stop| stop.matched == stop.text.len());
        found.map(|stop| stop.text.as_str()).max_by_key(|text| text.len())
    }

    /// Returns the text that was held back, when the answer ends without a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
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
        assert_eq!((stop.push("Ö."), stop.found()), ((String::new(), true), Some("ÄÖ")));
    }

    #[test]
    fn the_stop_string_that_ends_first_counts_and_long_ones_cost_as_much_as_short_ones() {
        let text = "aabaabaaab aabaac";
        for n in 1..text.len() {
            let pieces: Vec<&str> =
                text.as_bytes().chunks(n).map(|c| std::str::from_utf8(c).unwrap()).collect();
            assert_eq!(shown(&["aabaac", "zz"], &pieces), ("aabaabaaab ".into(), true), "{n}");
            assert_eq!(shown(&["aaab", "baaab aab"], &pieces), ("aabaab".into(), true), "{n}");
            assert_eq!(shown(&["abaaba", "ba"], &pieces), ("aa".into(), true), "{n}");
        }
        let mut stops = StopStrings::new((0..16).map(|i| format!("{}{i}", "x".repeat(100_000))));
        let started = std::time::Instant::now();
        assert_eq!((0..50_000).map(|_| stops.push("xy").0.len()).sum::<usize>(), 100_000);
        assert_eq!((0..50_000).map(|_| stops.push("x").0.len()).sum::<usize>(), 0);
        assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
    }
}
