//! Addresses that a server listens at.

use crate::{Error, Result};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::str::FromStr;

/// Number of attempts to find a port that is free at every address.
const TRIES: usize = 8;

/// Value of `--host`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenHost {
    /// One address.
    Ip(IpAddr),
    /// This machine, over IPv4 and IPv6.
    Localhost,
}

impl FromStr for ListenHost {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "localhost" => Ok(ListenHost::Localhost),
            text => {
                text.parse().map(ListenHost::Ip).map_err(|_| "neither an IP address nor localhost".into())
            }
        }
    }
}

impl std::fmt::Display for ListenHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ListenHost::Ip(ip) => ip.fmt(f),
            ListenHost::Localhost => f.write_str("localhost"),
        }
    }
}

/// Listeners of a server, and the address that a user types.
pub struct Listening {
    /// Listeners, one for each address.
    pub listeners: Vec<TcpListener>,
    /// Address that a user types.
    pub url: String,
}

impl ListenHost {
    /// Tells whether only this machine can reach the address.
    pub fn is_loopback(self) -> bool {
        match self {
            ListenHost::Ip(ip) => ip.is_loopback(),
            ListenHost::Localhost => true,
        }
    }

    /// Listens at every address of the host on this machine, at one port for all.
    ///
    /// # Errors
    /// The port is taken at an address, or the machine has none of the addresses.
    pub fn listen(self, port: u16) -> Result<Listening> {
        let addresses: &[IpAddr] = match &self {
            ListenHost::Ip(ip) => std::slice::from_ref(ip),
            ListenHost::Localhost => &[IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)],
        };
        let mut bound = bind_all(addresses, port);
        for _ in 1..TRIES {
            // A port that is free at one address may be taken at the other.
            match &bound {
                Err((_, e)) if port == 0 && e.kind() == ErrorKind::AddrInUse => {
                    bound = bind_all(addresses, port);
                }
                _ => break,
            }
        }
        let listeners = bound.map_err(|(ip, e)| {
            let free = if e.kind() == ErrorKind::AddrInUse { "; --port 0 takes a free one" } else { "" };
            Error::usage(format!("cannot listen at {ip} port {port}: {e}{free}"))
        })?;
        let address = listeners.first().and_then(|l| l.local_addr().ok());
        let address = address.ok_or_else(|| Error::usage("no address to listen at"))?;
        let url = match self {
            ListenHost::Ip(_) => format!("http://{address}"),
            ListenHost::Localhost => format!("http://localhost:{}", address.port()),
        };
        Ok(Listening { listeners, url })
    }
}

/// Binds addresses, the later ones to the port of the first. Skips an address that the system does not have if another one
/// works.
fn bind_all(addresses: &[IpAddr], port: u16) -> std::result::Result<Vec<TcpListener>, (IpAddr, io::Error)> {
    let mut listeners: Vec<TcpListener> = Vec::new();
    let mut absent = None;
    for &ip in addresses {
        let same = listeners.first().and_then(|l| l.local_addr().ok()).map_or(port, |a| a.port());
        match TcpListener::bind((ip, same)) {
            Ok(listener) => listeners.push(listener),
            // A system without IPv4 or IPv6 reports errors of its own: every other error counts as an absent address.
            Err(e) if matches!(e.kind(), ErrorKind::AddrInUse | ErrorKind::PermissionDenied) => {
                return Err((ip, e));
            }
            Err(e) => absent = absent.or(Some((ip, e))),
        }
    }
    match absent.filter(|_| listeners.is_empty()) {
        Some(failed) => Err(failed),
        None => Ok(listeners),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tells whether this machine has IPv6.
    fn has_ipv6() -> bool {
        TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok()
    }

    #[test]
    fn localhost_is_both_addresses_at_one_port() {
        let host: ListenHost = "localhost".parse().unwrap();
        assert!(host.is_loopback() && "nowhere".parse::<ListenHost>().is_err());
        let Listening { listeners, url } = host.listen(0).unwrap();
        let addresses: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
        assert_eq!(addresses.len(), if has_ipv6() { 2 } else { 1 });
        assert!(addresses.iter().all(|a| a.ip().is_loopback() && a.port() == addresses[0].port()));
        assert_eq!(url, format!("http://localhost:{}", addresses[0].port()));
    }

    #[test]
    fn a_port_that_is_taken_at_one_address_is_taken() {
        let last = if has_ipv6() { IpAddr::V6(Ipv6Addr::LOCALHOST) } else { Ipv4Addr::LOCALHOST.into() };
        let other = TcpListener::bind((last, 0)).unwrap();
        let port = other.local_addr().unwrap().port();
        let failed = ListenHost::Localhost.listen(port).err().unwrap();
        assert!(failed.to_string().contains(&format!("{last} port {port}")), "{failed}");
    }

    #[test]
    fn an_address_of_another_machine_is_refused_by_name() {
        // TEST-NET-1 (RFC 5737): no machine has this address.
        let failed = "192.0.2.1".parse::<ListenHost>().unwrap().listen(0).err().unwrap();
        assert!(failed.to_string().contains("cannot listen at 192.0.2.1"), "{failed}");
    }
}
