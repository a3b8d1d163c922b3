//! Parses addresses as users and Slurm write them.

use std::{net::IpAddr, path::PathBuf};

use crate::{DdpError, tcp::Place};

/// Parses a rendezvous URL. `None` for `env://`.
pub(crate) fn parse_url(url: &str) -> Result<Option<Place>, DdpError> {
    let wrong = |problem: &str| DdpError::Url {
        url: url.into(),
        problem: problem.into(),
    };
    let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("no scheme"))?;
    match scheme {
        "env" => Ok(None),
        "file" if rest.starts_with('/') => Ok(Some(Place::File(PathBuf::from(rest)))),
        "file" => Err(wrong("the path is not absolute")),
        "tcp" => {
            let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("no port"))?;
            if let Some((_, query)) = port.split_once('?') {
                let problem = "PyTorch's `?rank=` and `&world_size=` are arguments of `ProcessGroup::connect` here: leave out";
                return Err(wrong(&format!("{problem} `?{query}`")));
            }
            let host = host.trim_start_matches('[').trim_end_matches(']');
            if host.is_empty() {
                return Err(wrong("no host"));
            }
            let port = port.parse().ok().filter(|port| *port != 0);
            Ok(Some(Place::Address {
                host: host.into(),
                port: port.ok_or_else(|| wrong("the port is not 1 to 65535"))?,
                local: is_loopback(host),
            }))
        }
        _ => Err(wrong("unknown scheme")),
    }
}

/// Whether a host is literally `localhost` or a loopback address. A machine's own name does not count, though it often
/// resolves to a loopback address on that machine.
pub(super) fn is_loopback(host: &str) -> bool {
    let address: Result<IpAddr, _> = host.parse();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// The first host of a Slurm host list such as `node[03-07,12],login1` or `rack[0-1]n[0-3]`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let end = rest.find([',', '[']).unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        host.push_str(name);
        let Some(numbers) = after.strip_prefix('[') else {
            break;
        };
        let (numbers, after) = numbers.split_once(']')?;
        host.push_str(numbers.split([',', '-']).next()?);
        rest = after;
    }
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let address = |host: &str, port, local| {
            Some(Place::Address {
                host: host.into(),
                port,
                local,
            })
        };
        for (url, host, local) in [
            ("tcp://h:80", "h", false),
            ("tcp://10.0.0.1:80", "10.0.0.1", false),
            ("tcp://LocalHost:80", "LocalHost", true),
            ("tcp://127.0.1.1:80", "127.0.1.1", true),
            ("tcp://[::1]:80", "::1", true),
        ] {
            assert_eq!(parse_url(url).unwrap(), address(host, 80, local), "{url}");
        }
        assert_eq!(
            parse_url("file:///a/b").unwrap(),
            Some(Place::File("/a/b".into()))
        );
        assert_eq!(parse_url("env://").unwrap(), None);
        for url in [
            "h:80",
            "tcp://h",
            "tcp://:80",
            "tcp://h:0",
            "file://a",
            "http://h:1",
        ] {
            assert!(matches!(parse_url(url), Err(DdpError::Url { .. })), "{url}");
        }
        let of_pytorch = parse_url("tcp://h:80?rank=0&world_size=2").unwrap_err();
        let text = of_pytorch.to_string();
        assert!(text.contains("leave out `?rank=0&world_size=2`"), "{text}");
    }

    #[test]
    fn host_lists() {
        for (list, host) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[01-04,7]", "node01"),
            ("rack[3,5]-a,x", "rack3-a"),
            ("rack[0-1]n[0-3]", "rack0n0"),
            ("rack[2,4]n[07-09,12]-ib,x[1-2]", "rack2n07-ib"),
            ("a,node[1-2]", "a"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        assert_eq!(first_host(""), None);
        assert_eq!(first_host("node[1"), None);
        assert_eq!(first_host("rack[0-1]n[0"), None);
    }
}
