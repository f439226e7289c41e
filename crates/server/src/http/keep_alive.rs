//! Comments in a stream of server-sent events that is silent for long.

use futures_core::Stream;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};

/// Longest silence of a stream. Proxies give up after a minute, clients after five; a long prompt may take more.
pub const LONGEST_SILENCE: Duration = Duration::from_secs(15);
/// A comment, which clients skip.
const COMMENT: &str = ": the answer is coming\n\n";

/// Events, with a comment wherever none comes for a while.
pub struct KeptAlive<S> {
    events: S,
    silence: Duration,
    pause: Pin<Box<Sleep>>,
}

impl<S> KeptAlive<S> {
    /// Keeps a stream alive; a comment follows each `silence`.
    pub fn new(events: S, silence: Duration) -> KeptAlive<S> {
        KeptAlive { events, silence, pause: Box::pin(sleep(silence)) }
    }
}

impl<S: Stream<Item = Result<String, Infallible>> + Unpin> Stream for KeptAlive<S> {
    type Item = Result<String, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = match Pin::new(&mut self.events).poll_next(context) {
            Poll::Pending => match self.pause.as_mut().poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(()) => Some(Ok(COMMENT.into())),
            },
            Poll::Ready(next) => next,
        };
        let next_pause = Instant::now() + self.silence;
        self.pause.as_mut().reset(next_pause);
        Poll::Ready(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives an event, and then nothing for ever.
    struct Silent(Option<String>);

    impl Stream for Silent {
        type Item = Result<String, Infallible>;

        fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
            self.0.take().map_or(Poll::Pending, |event| Poll::Ready(Some(Ok(event))))
        }
    }

    #[test]
    fn a_silent_stream_gets_comments() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let got = runtime.block_on(async {
            let mut kept = KeptAlive::new(Silent(Some("data: x\n\n".into())), Duration::from_millis(20));
            let mut got = Vec::new();
            for _ in 0..3 {
                let next = std::future::poll_fn(|context| Pin::new(&mut kept).poll_next(context)).await;
                got.push(next.unwrap().unwrap());
            }
            got
        });
        assert_eq!(got, ["data: x\n\n", COMMENT, COMMENT]);
    }
}
