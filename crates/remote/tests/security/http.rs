//! The reports over HTTP.

use super::*;

#[test]
fn http_beyond_loopback_asks_for_tls_too() {
    let everywhere: SocketAddr = (Ipv4Addr::UNSPECIFIED, 0).into();
    let far = listen::ServerOptions { http: Some(everywhere), ..Default::default() };
    let refused = Server::start(loopback(), far.clone());
    assert!(matches!(refused, Err(StartError::InsecureHttp(_))), "{refused:?}");
    Server::start(loopback(), listen::ServerOptions { insecure: true, ..far.clone() }).unwrap();
    // With TLS, a plain request gets no response.
    let directory = tempfile::tempdir().unwrap();
    let authority = authority();
    let ours = files(directory.path(), "server", &authority, &authority);
    let tls = Some(server_config(&ours).unwrap());
    let server = Server::start(loopback(), listen::ServerOptions { tls, ..far }).unwrap();
    let port = server.http_address().unwrap().port();
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut answer = Vec::new();
    stream.write_all(b"GET /health HTTP/1.1\r\n\r\n").unwrap();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.windows(2).any(|text| text == b"ok"), "{answer:?}");
}

#[test]
fn slow_clients_of_http_do_not_keep_others_from_an_answer() {
    let http = Some(loopback());
    let server = start(listen::ServerOptions { http, ..Default::default() });
    let to = server.http_address().unwrap();
    let mut greedy: Vec<TcpStream> = Vec::new();
    for _ in 0..40 {
        // Sends nothing, or sends many requests and reads no response.
        greedy.push(TcpStream::connect(to).unwrap());
        let mut pipelining = TcpStream::connect(to).unwrap();
        pipelining.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let _ = pipelining.write_all(&b"GET /metrics HTTP/1.1\r\n\r\n".repeat(2000));
        greedy.push(pipelining);
    }
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nok\n"),
        "{answer}"
    );
}
