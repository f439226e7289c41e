//! A file at an address: read from any byte on, or in ranges, over any number of interruptions.

use crate::Error;
use crate::download::{DownloadFailure, DownloadSource, Opened};
use crate::http_client::{Answer, HttpClient, HttpRequest, Token, Tries, Trouble, is_passing, shown};
use std::io::{self, Read};
use std::ops::Range;
use url::Url;

/// Function that makes the error of a refusal: of its status, and of its code if it has one.
pub type Refused<'a> = dyn Fn(u16, Option<&str>) -> Error + 'a;

/// A file at an address.
pub struct HttpSource<'a> {
    /// Sends the requests.
    pub client: &'a HttpClient,
    /// Address of the file.
    pub url: &'a Url,
    /// Token sent with a request.
    pub token: Option<&'a Token>,
    /// Makes the error of a refusal.
    pub refused: Box<Refused<'a>>,
}

/// An answer with bytes of a file.
struct Part {
    answer: Answer,
    /// First byte that comes.
    from: u64,
    /// Length of the whole file, where the server tells it.
    size: Option<u64>,
}

impl HttpSource<'_> {
    /// Asks for bytes at the file's address, or at one that it was redirected to.
    fn ask(&self, url: &Url, from: u64, to: Option<u64>) -> Result<Part, DownloadFailure> {
        let token = self.token.filter(|_| url.origin() == self.url.origin());
        let request = HttpRequest { method: "GET", url, from, to, token, follow: true };
        let answer = self.client.send(&request).map_err(|trouble| match trouble {
            Trouble::Passing(what) => DownloadFailure::Network(what),
            Trouble::Lasting(what) => DownloadFailure::WrongContents(what),
        })?;
        match answer.status {
            200 => Ok(Part { from: 0, size: answer.length(), answer }),
            206 => {
                let unsaid = || DownloadFailure::WrongContents("it does not say which part it sends".into());
                let (from, size) = content_range(&answer).ok_or_else(unsaid)?;
                Ok(Part { answer, from, size })
            }
            416 if from > 0 && to.is_none() => self.ask(url, 0, None),
            status if is_passing(status, None) => {
                answer.wait_as_asked();
                Err(DownloadFailure::Network(format!("status {status} of {}", shown(url))))
            }
            status => Err(DownloadFailure::Refused((self.refused)(status, answer.header("x-error-code")))),
        }
    }

    /// Fetches the bytes `range` of a file of `size` bytes; the range must lie within the file. Returns `None` where the
    /// server sends only whole files. `redirect` is the address that served the last part, which is tried first.
    ///
    /// # Errors
    /// The bytes do not come, or the server sends other ones.
    pub fn bring_range(
        &self,
        size: u64,
        range: Range<u64>,
        redirect: &mut Option<Url>,
    ) -> Result<Option<Vec<u8>>, DownloadFailure> {
        let (mut bytes, mut tries) = (Vec::new(), Tries::default());
        loop {
            let from = range.start + bytes.len() as u64;
            if from >= range.end {
                return Ok(Some(bytes));
            }
            let was_redirected = redirect.is_some();
            let why = match self.receive(size, from..range.end, redirect, &mut bytes) {
                Ok(true) => "the connection ended early".to_string(),
                // A redirect's address is valid for a limited time.
                Ok(false) | Err(_) if was_redirected && redirect.take().is_some() => continue,
                Ok(false) => return Ok(None),
                Err(DownloadFailure::Network(why)) => why,
                Err(other) => return Err(other),
            };
            if !tries.reaches(bytes.len() as u64) && !tries.pause(&why) {
                return Err(DownloadFailure::Network(why));
            }
        }
    }

    /// Asks once and appends the received bytes, also where the connection breaks. Returns false where the server sends only
    /// whole files.
    fn receive(
        &self,
        size: u64,
        range: Range<u64>,
        redirect: &mut Option<Url>,
        bytes: &mut Vec<u8>,
    ) -> Result<bool, DownloadFailure> {
        let url = redirect.as_ref().unwrap_or(self.url);
        let part = self.ask(url, range.start, Some(range.end))?;
        if part.answer.status == 200 && range != (0..size) {
            return Ok(false);
        }
        let wrong = |what: String| Err(DownloadFailure::WrongContents(what));
        if part.from != range.start {
            return wrong("it sends another part than was asked for".into());
        }
        if let Some(found) = part.size.filter(|found| part.answer.status == 206 && *found != size) {
            return wrong(format!("it has {found} bytes, not {size}"));
        }
        let (status, from) = (part.answer.status, part.answer.url.clone());
        let broken = |e: io::Error| DownloadFailure::Network(format!("{}: {e}", shown(self.url)));
        // Bytes after the range are not read.
        part.answer.reader().take(range.end - range.start).read_to_end(bytes).map_err(broken)?;
        *redirect = (status == 206 && from != *self.url).then_some(from);
        Ok(true)
    }
}

impl DownloadSource for HttpSource<'_> {
    fn open(&self, from: u64) -> Result<Opened<'_>, DownloadFailure> {
        let Part { answer, from, size } = self.ask(self.url, from, None)?;
        // Without the length of the whole, the length of what comes tells it.
        let size = size.or_else(|| answer.length().map(|bytes| from + bytes));
        Ok(Opened { from, size, body: Box::new(answer.reader()) })
    }
}

/// Reads a header such as `bytes 5-9/10`: the first byte of the part, and the length of the whole where it is told.
fn content_range(answer: &Answer) -> Option<(u64, Option<u64>)> {
    let (place, total) = answer.header("content-range")?.strip_prefix("bytes ")?.split_once('/')?;
    Some((place.split_once('-')?.0.trim().parse().ok()?, total.trim().parse().ok()))
}
