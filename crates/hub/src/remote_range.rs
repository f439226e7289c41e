//! Download of a part of a file over any number of interruptions.

use crate::download::{DownloadFailure, RETRY_PAUSE, TRIES};
use crate::http_client::{Answer, HttpClient, HttpRequest, Token, Trouble, shown};
use std::io::Read;
use std::ops::Range;
use url::Url;

/// A file of which parts are wanted.
pub struct PartlyWanted<'a> {
    /// Address of the file.
    pub url: &'a Url,
    /// Token sent with the request.
    pub token: Option<&'a Token>,
    /// Length of the whole file in bytes.
    pub size: u64,
}

/// Reason why a part did not come.
#[derive(Debug)]
pub enum RangeFailure {
    /// The server sends only whole files.
    WholeOnly,
    /// Another fault, which a download of the whole file would meet as well.
    Other(DownloadFailure),
}

impl From<DownloadFailure> for RangeFailure {
    fn from(failure: DownloadFailure) -> RangeFailure {
        RangeFailure::Other(failure)
    }
}

/// Fetches the bytes `range` of a file; the range must lie within the file. `redirect` is the address that served the
/// last part, which is tried first.
///
/// # Errors
/// The bytes do not come, or the server sends other ones.
pub fn bring_range(
    client: &HttpClient,
    wanted: &PartlyWanted,
    range: Range<u64>,
    redirect: &mut Option<Url>,
) -> Result<Vec<u8>, RangeFailure> {
    let mut bytes = Vec::new();
    let mut tries = 0;
    loop {
        let before = bytes.len();
        let from = range.start + before as u64;
        if from >= range.end {
            return Ok(bytes);
        }
        let was_redirected = redirect.is_some();
        let why = match receive(client, wanted, from..range.end, redirect, &mut bytes) {
            Ok(()) => "the connection ended early".to_string(),
            // A redirect's address is valid for a limited time.
            Err(_) if was_redirected && redirect.take().is_some() => continue,
            Err(RangeFailure::Other(DownloadFailure::Network(why))) => why,
            Err(other) => return Err(other),
        };
        tries = if bytes.len() > before { 0 } else { tries + 1 };
        if tries >= TRIES {
            return Err(DownloadFailure::Network(why).into());
        }
        if tries > 0 {
            std::thread::sleep(RETRY_PAUSE * 2u32.pow(tries - 1));
        }
    }
}

/// Asks once and appends the received bytes, also where the connection breaks.
fn receive(
    client: &HttpClient,
    wanted: &PartlyWanted,
    range: Range<u64>,
    redirect: &mut Option<Url>,
    bytes: &mut Vec<u8>,
) -> Result<(), RangeFailure> {
    let url = redirect.as_ref().unwrap_or(wanted.url);
    let request = HttpRequest {
        method: "GET",
        url,
        from: range.start,
        to: Some(range.end),
        token: wanted.token.filter(|_| url.origin() == wanted.url.origin()),
        headers: &[],
        follow: true,
    };
    let answer = client.send(&request).map_err(|t| match t {
        Trouble::Passing(what) => DownloadFailure::Network(what),
        Trouble::Lasting(what) => DownloadFailure::WrongContents(what),
    })?;
    match answer.status {
        206 => check_range(&answer, &range, wanted.size)?,
        200 if range == (0..wanted.size) => {}
        200 => return Err(RangeFailure::WholeOnly),
        416 => {
            let what = format!("the server has no bytes from {} on, of {}", range.start, wanted.size);
            return Err(DownloadFailure::WrongContents(what).into());
        }
        _ => return Err(DownloadFailure::of_status(url, answer).into()),
    }
    let (status, from) = (answer.status, answer.url.clone());
    let broken = |e| DownloadFailure::Network(format!("{}: {e}", shown(wanted.url)));
    // Bytes after the range are not read.
    answer.reader().take(range.end - range.start).read_to_end(bytes).map_err(broken)?;
    *redirect = (status == 206 && from != *wanted.url).then_some(from);
    Ok(())
}

/// Checks a header such as `bytes 5-9/10`: the part starts where it should, in a file of the expected length.
fn check_range(answer: &Answer, range: &Range<u64>, size: u64) -> Result<(), RangeFailure> {
    let said = answer.header("content-range").and_then(|text| {
        let (place, total) = text.strip_prefix("bytes ")?.split_once('/')?;
        let start: u64 = place.split_once('-')?.0.trim().parse().ok()?;
        Some((start, total.trim().parse::<u64>().ok()))
    });
    match said {
        Some((start, _)) if start != range.start => {
            Err(DownloadFailure::WrongContents("it sends another part than was asked for".into()).into())
        }
        Some((_, Some(total))) if total != size => {
            Err(DownloadFailure::WrongContents(format!("it has {total} bytes, not {size}")).into())
        }
        Some(_) => Ok(()),
        None => Err(DownloadFailure::WrongContents("it does not say which part it sends".into()).into()),
    }
}
